"""A small part of every fuzzer; `nox -s fuzz` runs them for longer."""

from __future__ import annotations

import pytest
import support.fuzz
from support.fuzz import Target, fuzz
from support.fuzz_run import TARGETS

COUNT = 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_changed_at_random_works_or_is_refused_with_a_clear_error(name, tmp_path):
    target = TARGETS[name](tmp_path)
    try:
        findings = fuzz(target, name, count=COUNT)
    finally:
        target.close()
    assert not findings.found, str(findings)
    assert findings.refused > 0


class Careless(Target):
    """Breaks every promise, one after the other."""

    def make(self, rng):
        return rng.choice(["key", "late", "half", "loop", "fine"])

    def fresh(self):
        return {"loaded": False}

    def look(self, subject):
        return dict(subject)

    def load(self, subject, given):
        if given == "key":
            return subject["missing"]
        if given == "half":
            subject["loaded"] = True
            raise ValueError(given)
        while given == "loop":
            pass
        return given

    def use(self, subject, given, loaded):
        assert given != "late"

    def is_clear(self, error):
        return True


def test_every_broken_promise_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(support.fuzz, "LIMIT_S", 0.02)
    found = fuzz(Careless(tmp_path), "careless", count=30).found
    kinds = sorted(kind.partition(" at ")[0] for kind in found)
    assert kinds == [
        "changed by what was refused: ValueError",
        "load: KeyError",
        "load: SlowError",
        "use: AssertionError",
    ]
