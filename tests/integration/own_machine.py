"""A command on what it takes for a machine of its own: another host name, and its own /etc/hosts.

python -m own_machine NAME HOSTS COMMAND... as root. HOSTS is a file that takes the place of /etc/hosts.
"""

import os
import sys

_BEGIN = (
    'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
)

if __name__ == "__main__":
    os.execvp("unshare", ["unshare", "--uts", "--mount", "sh", "-c", _BEGIN, *sys.argv[1:]])
