"""Unit files of systemd for the daemons; `diloco host units` installs them on a machine."""
