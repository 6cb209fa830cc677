"""What the soak complains of; the soak itself is `make soak`."""

from __future__ import annotations

import pytest

from tools import soak

IDLE = {"minute": 1, "slots_taken": 0, "resident_mib": 3000, "file_handles": 130, "compaction_passes": 5,
        "compaction_refused": None}  # fmt: skip


def judged(*changes: dict) -> list[str]:
    report = soak.Report(samples=[IDLE | change for change in changes])
    soak.judge(report)
    return report.complaints


def test_a_steady_idle_server_is_well():
    assert judged({}, {"resident_mib": 3200}, {"resident_mib": 3290, "file_handles": 140}) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots_taken": 3}, "3 slots were still taken at minute 1"),
        ({"resident_mib": 3400}, "resident memory grew from 3000 to 3400 MiB"),
        ({"file_handles": 190}, "file handles grew from 130 to 190"),
        ({"compaction_passes": 0}, "compaction moved nothing"),
        ({"compaction_refused": "a row is lost"}, "compaction went off: a row is lost"),
    ],
)
def test_complaints(change, says):
    (complaint,) = judged({}, change)
    assert complaint.startswith(says)


def test_an_answer_that_is_not_allowed_is_a_complaint():
    report = soak.Report()
    report.answer("good", "200", {"200"})
    report.answer("good", "500", {"200"})
    assert report.complaints == ["good was answered 500, not 200"]
    assert "| good: 500 | 1 |" in soak.markdown(report, 20)


def test_how_long_it_will_take_is_said_first(monkeypatch, capsys, tmp_path):
    def running(*_):
        raise ConnectionError("not now")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(soak.server, "running", running)
    monkeypatch.setattr("sys.argv", ["soak", "--minutes", "1"])
    assert soak.main() == 1
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("1 minute of requests in 6 stretches; ") and said.endswith(" 2 to 5 minutes in all")


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--pauses", "0"]])
def test_without_time_there_is_no_soak(words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["soak", *words])
    with pytest.raises(SystemExit):
        soak.main()
    assert "must be above 0" in capsys.readouterr().err
