"""Tell by a guest attribute whether this machine's learner is at the end of its run.

A learner's unit runs it before each start, and when the learner has ended: the last status that it
gave says why. The keeper reads it. No right is needed for it: each machine may write its own.
"""

import sys

from diloco.infra.cloud import Google

ATTRIBUTE = "diloco/run"
GOES_ON, ENDED = "goes-on", "ended"
# What a learner's last status is after the end of its run, and after no other end.
STATUS = "left: run ended"
DROP_IN = f"""# Whether the run has ended, for the keeper of this machine's group. (A program
# with "+" is root's.)
[Service]
ExecStartPre=-+/bin/sh -c '\\
  cd /usr/local/lib/diloco && exec /usr/bin/python3 -m diloco.infra.ended {GOES_ON}'
ExecStopPost=-+/bin/sh -c '\\
  test "$$(systemctl show --value -p StatusText %n)" != "{STATUS}" || \\
  {{ cd /usr/local/lib/diloco && exec /usr/bin/python3 -m diloco.infra.ended {ENDED}; }}'
"""

if __name__ == "__main__":
    try:
        Google().tell(ATTRIBUTE, sys.argv[1])
    except OSError as error:
        sys.exit(f"cannot tell the keeper that the run {sys.argv[1]}: {error}")
