"""The hosts of one learner, and the messages between them beside JAX's own traffic.

Host 0, the coordinator, alone connects to NATS: it reads the tape (the run's JetStream stream),
plans each step boundary, and announces updates. The other hosts, the workers, only read and write
the object store. Each worker has one TCP connection to host 0, made before training. A collective
of JAX tells all hosts the address of host 0 and a secret, which no other process has.

A connection that ends before the learner has ended means that a host is gone. The other hosts
cannot train without that host: they exit, their supervisors restart them, and the learner returns
with all hosts. A timer ends a process that hangs in a collective with a host that is gone.
"""
