"""The counts of the guard of the tape, and how it has servers reload."""

import pytest

from diloco.common.protocol.errors import ConfigError
from diloco.operate.auth.guard import SPAN_S, Rates, reload_command


def test_a_rate_is_taken_over_ten_seconds():
    rates = Rates(2.0)
    assert not any(rates.count("a", 100.0) for _ in range(20)), "what an outage has held back"
    assert rates.count("a", 99.9 + SPAN_S)
    assert not rates.count("b", 100.0), "of each by itself"


def test_whoever_keeps_to_the_rate_is_never_cut_off():
    rates = Rates(2.0)
    assert not any(rates.count("a", 100.0 + number / 2.0) for number in range(1000))
    steady = Rates(2.0)
    assert any(steady.count("a", 100.0 + number / 2.5) for number in range(1000))


def test_bytes_count_as_well_as_messages():
    """40 messages of 1 MiB a second are no more messages than an honest fleet member may send."""
    rates = Rates(100.0, 1e6)
    assert not any(rates.count("a", 100.0, 1 << 20) for _ in range(9))
    assert rates.count("a", 100.0, 1 << 20)
    assert not any(rates.count("b", 100.0 + n / 10, 90_000) for n in range(1000))


def test_servers_reload_by_signal_or_by_a_command(tmp_path):
    with pytest.raises(ConfigError, match=r"no nats-server runs.*nats-server\.pid"):
        reload_command(tmp_path, None)
    (tmp_path / "nats-server.pid").write_text("1")
    assert reload_command(tmp_path, None)[:2] == ["nats-server", "--signal"]
    assert reload_command(tmp_path, "push 'a b' --now") == ["push", "a b", "--now"]
