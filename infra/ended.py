"""Writes to a guest attribute of this machine whether its learner has reached the end of its run.

    python3 -m diloco.infra.ended goes-on|ended

A learner's unit runs this program before each start of the learner, and again if the learner's last
status says that the run has ended. The keeper (`keeper.py`) reads the attribute. The program needs
no permission, as each machine may write its own attributes.
"""

import sys

from diloco.infra.cloud import Google

ATTRIBUTE = "diloco/run"
GOES_ON, ENDED = "goes-on", "ended"
# How a learner's last status begins after the end of its run, and only then.
STATUS = "left: run ended"
DROP_IN = f"""# Whether the run has ended, for the keeper of this machine's group. (A program
# with "+" is root's.)
[Service]
ExecStartPre=-+/bin/sh -c '\\
  cd /usr/local/lib/diloco && exec /usr/bin/python3 -m diloco.infra.ended {GOES_ON}'
ExecStopPost=-+/bin/sh -c '\\
  case "$$(systemctl show --value -p StatusText %n)" in "{STATUS}"*) ;; *) exit 0 ;; esac; \\
  {{ cd /usr/local/lib/diloco && exec /usr/bin/python3 -m diloco.infra.ended {ENDED}; }}'
"""

if __name__ == "__main__":
    try:
        Google().tell(ATTRIBUTE, sys.argv[1])
    except OSError as error:
        sys.exit(f"cannot tell the keeper that the run {sys.argv[1]}: {error}")
