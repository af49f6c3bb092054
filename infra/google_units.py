"""Texts of systemd units that only machines of infra/terraform on Google Cloud have.

Four run without a release, each a module with the system's own Python: one answers health checks
(`livez.py`), one sends logs to Cloud Logging (`logs.py`), one is the keeper of learners' groups
(`keeper.py`), on one machine of a run, and one is a region's cache (`cache.py`). Others add to a
learner's unit.
"""

PROGRAM = "/usr/local/lib/diloco"
LIVEZ = "diloco-livez.service"
LOGS = "diloco-logs.service"
KEEPER = "diloco-keeper.service"
CACHE = "diloco-cache.service"
_UNIT = f"""[Unit]
Description={{what}}

[Service]
WorkingDirectory={PROGRAM}
ExecStart=/usr/bin/python3 -m diloco.infra.{{module}}
Restart=always
RestartSec=5
OOMScoreAdjust=-500
{{more}}
DynamicUser=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
ProcSubset=pid
PrivateTmp=yes
PrivateDevices=yes
PrivateUsers=yes
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
MemoryMax=256M
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM
RestrictAddressFamilies={{families}}

[Install]
WantedBy=multi-user.target
"""
UNITS = {
    LIVEZ: _UNIT.format(
        what="Answers health checks of this machine",
        module="livez",
        more="",
        families="AF_INET AF_INET6",
    ),
    LOGS: _UNIT.format(
        what="Logs of this machine to Cloud Logging",
        module="logs",
        more="SupplementaryGroups=systemd-journal\nStateDirectory=diloco-logs\n",
        families="AF_INET AF_INET6 AF_UNIX",
    ),
    KEEPER: _UNIT.format(
        what="Keeper of the groups of learners of a diloco run",
        module="keeper",
        more="StateDirectory=diloco-keeper\n",
        families="AF_INET AF_INET6",
    ),
}
# nginx begins as root, which alone may read the token, and serves as www-data.
UNITS[CACHE] = f"""[Unit]
Description=Read-through cache of a diloco run's versions
After=network-online.target
Wants=network-online.target

[Service]
WorkingDirectory={PROGRAM}
ExecStart=/usr/bin/python3 -m diloco.infra.cache
Restart=always
RestartSec=5
KillMode=mixed
RuntimeDirectory=diloco-cache
RuntimeDirectoryMode=0700
CacheDirectory=diloco-cache
CapabilityBoundingSet=CAP_CHOWN CAP_SETUID CAP_SETGID CAP_KILL CAP_DAC_OVERRIDE
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
PrivateTmp=yes
PrivateDevices=yes
RestrictNamespaces=yes
LockPersonality=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
LimitNOFILE=16384

[Install]
WantedBy=multi-user.target
"""
# A group that owns the TPU chips' devices, so that a learner's dynamic user may open them; by
# default the kernel gives /dev/vfio/0 and the like to root alone.
_GROUP = "diloco-accelerators"
ACCELERATORS = {
    "etc/sysusers.d/diloco-accelerators.conf": f"g {_GROUP} -\n",
    "etc/udev/rules.d/90-diloco.rules": (
        f'SUBSYSTEM=="vfio", GROUP="{_GROUP}", MODE="0660"\n'
        f'SUBSYSTEM=="accel", GROUP="{_GROUP}", MODE="0660"\n'
    ),
    "etc/systemd/system/diloco-learner@.service.d/30-accelerators.conf": (
        f"[Service]\nSupplementaryGroups={_GROUP}\n"
    ),
}


# The folder of the run's data on a learner's machine, which the task's option names.
DATA = "/var/lib/diloco-data/tokens"
DATA_UNIT = "diloco-data.service"
_DATA_UNIT = f"""[Unit]
Description=Data of a diloco run, from a bucket to this disk
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
RemainAfterExit=yes
# Each shard is compared with the manifest; what is here already stays, so that it goes on.
ExecStart=/bin/sh -c 'until /opt/diloco/bin/diloco data copy {{place}} {DATA}; do sleep 15; done'
TimeoutStartSec=infinity
StateDirectory=diloco-data
StateDirectoryMode=0755
UMask=0022
CapabilityBoundingSet=
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
PrivateTmp=yes
PrivateDevices=yes
RestrictNamespaces=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
"""
# The learner starts only after the copy, however long it takes.
_AFTER_DATA = f"[Unit]\nRequires={DATA_UNIT}\nAfter={DATA_UNIT}\n"


def data_units(place: str) -> dict[str, str]:
    """Returns unit files that copy prepared data to `DATA` before the learner starts.

    Args:
        place: URL of the data's folder in a bucket.

    Returns:
        The text of each file, by path below the file system's root.
    """
    return {
        f"etc/systemd/system/{DATA_UNIT}": _DATA_UNIT.format(place=place),
        "etc/systemd/system/diloco-learner@.service.d/50-data.conf": _AFTER_DATA,
    }
