"""What operators install besides the daemons: releases, units, NATS, machines of Google Cloud."""
