"""Log files of services stay below their cap."""

from deploy.local.launch import cap_log


def test_the_newest_half_of_a_log_moves_away_and_its_writer_goes_on(tmp_path):
    log = tmp_path / "a.log"
    with log.open("ab", 0) as writer:
        writer.write(b"old\n" * 10 + b"new\n" * 10)
        assert not cap_log(log, 80)
        assert cap_log(log, 79)
        writer.write(b"newest\n")
    assert log.read_bytes() == b"newest\n"
    assert (tmp_path / "a.log.1").read_bytes() == (b"old\n" * 10 + b"new\n" * 10)[-39:]


def test_a_log_that_filled_its_disk_is_emptied_though_no_half_of_it_fits_beside_it(tmp_path):
    log = tmp_path / "a.log"
    log.write_bytes(b"line\n" * 1000)
    (tmp_path / "a.log.1").symlink_to("/dev/full")
    assert cap_log(log, 1000)
    assert log.stat().st_size == 0


def test_a_log_that_is_not_there_is_below_its_cap(tmp_path):
    assert not cap_log(tmp_path / "a.log", 0)
