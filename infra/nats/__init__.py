"""Templates of nats-server's configuration; `diloco auth` fills them in."""
