from dataclasses import replace

from scripts.bench.pages import circumstances, facts_in_lines, flat
from tests.bench.measured import outcome


def test_values_stand_in_one_line() -> None:
    values = {
        "memory_bytes": 25_300_000_000,
        "cores": 2,
        "share": 0.12345,
        "missed": {},
        "versions": {"a": "1"},
    }
    assert flat(values) == "memory 25.3 GB; cores 2; share 0.1235; missed none; versions (a 1)"
    assert flat({"held": [True, None]}) == "held [true, none]"


def test_facts_are_a_list_of_at_most_two_levels() -> None:
    facts = {"cut": {"random": 0.75}, "parts": {"metis": {"halo": [1, 2]}}, "edges": 5}
    assert facts_in_lines(facts).splitlines() == [
        "- cut: random 0.75",
        "- parts:",
        "  - metis: halo [1, 2]",
        "- edges: 5",
    ]


def test_servers_that_are_alike_are_described_once() -> None:
    lines, command = circumstances(outcome())
    assert [line for line in lines.splitlines() if "Servers" in line] == [
        "- Servers (random, metis): kind namespaces."
    ]
    assert command.startswith("    python scripts/bench")


def test_a_calibration_is_told_once_and_says_what_it_missed() -> None:
    note = {
        "rate": "38mbit", "baseline": "random", "phi": 0.64, "wanted": 0.65, "within_tolerance": True,
        "seconds_at_rate": 0.209, "seconds_free": 0.0762,
    }  # fmt: skip
    given = outcome()
    network = {name: {**values, "calibration": note} for name, values in given.network.items()}
    text = circumstances(replace(given, network=network))[0]
    assert text.count("Matched phi") == 1
    assert (
        "at 38mbit the network costs random 0.64 of its time (0.209 s per epoch, 0.0762 s with free" in text
    )
    assert "not reached" not in text
    # Medians of random: 2.1 s. The machine was slower by then, and the share of the network with it another.
    assert "by the median of the repetitions 0.96" in text


def test_nothing_known_is_nothing_said() -> None:
    bare = replace(outcome(), machine={}, network={}, date="", command="")
    assert circumstances(bare) == []
