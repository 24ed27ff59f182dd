"""shared/observe/span_store.py on a disk that gets full."""

import os

import pytest

from shared.observe import span_store
from shared.observe.span_record import SpanRecord
from shared.observe.timeline import local_spans


def spans(*numbers):
    return [SpanRecord(trace_id="a", span_id=f"s{n}", name="n", start_ns=1, end_ns=2) for n in numbers]


def test_what_a_full_disk_takes_in_part_counts_as_lost_and_costs_nothing_that_comes_later(
    tmp_path, monkeypatch
):
    exporter = span_store.JsonlSpanExporter(tmp_path, "test")
    exporter.export(spans(1, 2))
    write, room = os.write, [150]

    def little(fd, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken, room[0] = write(fd, data[: room[0]]), 0
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(span_store.os, "write", little)
        for numbers in ((3, 4, 5), (6,)):
            with pytest.raises(OSError, match="No space left"):
                exporter.export(spans(*numbers))
    exporter.export(spans(7, 8))
    exporter.export(spans(9))
    exporter.close()
    assert [span.span_id for span in local_spans(tmp_path)] == ["s1", "s2", "s3", "s7", "s8", "s9"]
