"""`diloco` as another release of it, which writes one schema of messages and reads some.

Run as: python -m other_release WRITES READS COMMAND ..., READS being a list such as 1,2.
"""

import sys

from diloco.common.protocol.wire import encoding
from diloco.program import main

if __name__ == "__main__":
    writes, reads = sys.argv[1:3]
    encoding.SCHEMA = int(writes)
    encoding.READABLE = frozenset(map(int, reads.split(",")))
    del sys.argv[1:3]
    main()
