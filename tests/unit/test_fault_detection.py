"""What the fault tests take for the news of a death."""

import json
from datetime import UTC, datetime

from deploy.local.config import paths_of
from tests.fault.detection import LogTail

KILLED_S = 1_795_887_509.905_859


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


def tail(tmp_path, **logs: list[tuple[float, str]]) -> LogTail:
    """Of logs that gain these events, by service."""
    folder = paths_of(tmp_path).logs
    folder.mkdir(parents=True)
    for name in logs:
        (folder / f"{name}.log").write_text("")
    found = LogTail()
    found.begin(tmp_path)
    for name, events in logs.items():
        lines = [json.dumps({"time": stamp(KILLED_S + after_s), "event": event}) for after_s, event in events]
        (folder / f"{name}.log").write_text("".join(line + "\n" for line in lines))
    return found


def test_what_was_said_before_the_kill_is_no_news_of_it(tmp_path):
    log = tail(
        tmp_path, gateway=[(-0.002, "prompt_tree_given_up")], keeper=[(0.3, "prompt_tree_beat_failed")]
    )
    assert list(log.learnt_s("redis", KILLED_S)) == ["keeper"]


def test_what_a_log_cut_to_milliseconds_says_at_the_kill_is_news_of_it(tmp_path):
    log = tail(tmp_path, gateway=[(0.0, "prompt_tree_given_up"), (0.5, "prompt_tree_beat_failed")])
    (learnt_s,) = log.learnt_s("redis", KILLED_S).values()
    assert KILLED_S - 0.001 < learnt_s <= KILLED_S


def test_the_loss_of_another_process_is_no_news_of_this_ones(tmp_path):
    log = tail(
        tmp_path,
        gateway=[(0.1, "prompt_tree_given_up"), (0.2, "worker_link_down")],
        scheduler=[(0.3, "instance_dead")],
        decode=[(0.4, "mempool_lost")],
    )
    assert set(log.learnt_s("prefill-0", KILLED_S)) == {"gateway", "scheduler"}
    assert set(log.learnt_s("mempool", KILLED_S)) == {"decode"}
    assert log.learnt_s("keeper", KILLED_S) == {}


def test_the_supervisors_notice_names_who_ended(tmp_path):
    log = tail(tmp_path, supervisor=[])
    with (paths_of(tmp_path).logs / "supervisor.log").open("a") as file:
        file.write(f"{stamp(KILLED_S + 0.1)} exited keeper: killed by signal 9\n")
    assert set(log.learnt_s("keeper", KILLED_S)) == {"supervisor"}
    assert log.learnt_s("redis", KILLED_S) == {}
