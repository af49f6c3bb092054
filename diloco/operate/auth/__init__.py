"""`diloco auth`: credentials and permissions on NATS, and the guard against floods."""
