"""The hosts of one learner, and the messages between them beside JAX's own traffic.

Host 0, the coordinator, speaks to the run: it reads the tape, plans, and announces updates. The
others, workers, only read and write the store. Each has one TCP connection to host 0, made before
training; a collective of JAX gives the hosts host 0's address and a secret, which no other
process has.

A connection that ends before the learner has ended means that a host is gone. Its peers cannot
train without it: they exit, their supervisors restart them, and the learner returns with all hosts.
A timer ends a process that hangs in a collective with a host that is gone.
"""
