"""The hosts of one learner, and what they tell each other beside JAX's own traffic.

Host 0, the coordinator, speaks to the run: it reads the tape, plans, and announces updates. The
others, workers, only read and write the store. Each has one TCP connection to host 0, made before
training; its address and a secret go round by a collective of JAX, so that nobody else can join in.

A connection that ends before the learner has ended means that a host is gone. Its peers cannot go
on without it: they end, are started again by whoever started them, and the learner comes back
whole. A process that hangs in a collective with a host that is gone is ended by a timer.
"""
