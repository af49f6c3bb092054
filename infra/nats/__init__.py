"""Configurations of nats-server; `diloco auth` fills them in."""
