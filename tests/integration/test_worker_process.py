"""Real worker processes with the mock engine, between a scripted gateway, scheduler and coordinator."""

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from deploy.local.probes import in_flight
from shared.free_ports import free_port
from shared.ids import HandoffId, InstanceId
from shared.observe.service import EXIT_BUG
from shared.testing.mock_tokens import MockVocabulary
from shared.testing.processes import ServiceProcess, get_json
from shared.testing.scripted_gateway import ScriptedGateway
from shared.wire.reports import Welcome
from shared.wire.requests import Failed, Finished, HandoffTarget, Prefilled, SamplingSpec
from tests.integration.worker_rig import ScriptedCoordinator, ScriptedScheduler, until


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class World:
    """Scripted neighbours and the workers started beside them."""

    def __init__(self, model_dir, log_dir):
        self.model_dir, self.log_dir = model_dir, log_dir
        self.vocabulary = MockVocabulary.of_model(str(model_dir))
        self.coordinator, self.scheduler = ScriptedCoordinator(), ScriptedScheduler()
        self.workers: list[ServiceProcess] = []

    def worker(self, role="decode", **settings):
        """A worker process, not started."""
        admin = free_port()
        values = {
            "listen": "tcp://127.0.0.1:0",
            "admin_listen": f"127.0.0.1:{admin}",
            "coordinator_url": self.coordinator.url,
            "scheduler_reports": self.scheduler.address,
            "redis_url": "",
            "model_dir": str(self.model_dir),
            "engine": "mock",
            "block_tokens": "4",
            "mock_step_ms": "2",
            "gateway_silent_ms": "60000",  # the machine may stop the test, which is its gateway
            **{key: str(value) for key, value in settings.items()},
        }
        flags = [word for key, value in values.items() for word in ("--" + key.replace("_", "-"), value)]
        name = values.get("instance", f"{role}-0")
        process = ServiceProcess.of_module(
            f"services.{role}", flags, name=name, log_dir=self.log_dir, admin_url=f"http://127.0.0.1:{admin}"
        )
        self.workers.append(process)
        return process

    async def ready(self, process):
        """Started, registered and ready; what the coordinator was told and the epoch it gave."""
        if not process.running:
            process.start()
        await asyncio.to_thread(process.wait_ready)
        epoch, register = self.coordinator.members[process.name]
        return register, epoch

    @asynccontextmanager
    async def gateway_to(self, process):
        register, epoch = await self.ready(process)
        async with ScriptedGateway(register.endpoint, epoch) as gateway:
            yield gateway


@asynccontextmanager
async def world(model_dir, tmp_path):
    made = World(model_dir, tmp_path)
    await made.coordinator.start()
    await made.scheduler.start()
    try:
        yield made
    finally:
        for process in made.workers:
            if process.running:
                await asyncio.to_thread(process.kill)
        made.scheduler.close()
        await made.coordinator.stop()
        for process in made.workers:
            await asyncio.to_thread(process.assert_no_orphans)


async def test_a_worker_registers_says_hello_reports_and_serves(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        worker = here.worker()
        async with here.gateway_to(worker) as gateway:
            epoch, register = here.coordinator.members["decode-0"]
            assert (register.role, register.pid) == ("decode", worker.pid)
            await until(lambda: here.scheduler.reports, "a report")
            hello = here.scheduler.hellos[-1]
            assert (hello.epoch, hello.role, hello.endpoint) == (epoch, "decode", register.endpoint)
            gateway.generate("r", [4, 5, 6], max_tokens=16)
            end = await gateway.end_of("r")
            assert isinstance(end, Finished)
            assert gateway.tokens["r", 0] == here.vocabulary.tokens([4, 5, 6], 16)
            await until(lambda: here.coordinator.heartbeats, "a heartbeat")
            told = here.scheduler.reports
            await until(lambda: told[-1].num_prefills_measured and told[-1].num_decodes_measured, "measuring")
            assert not told[0].num_prefills_measured
            seqs = [r.seq for r in here.scheduler.reports]
            # a link that broke, where this process stood still, has taken some along
            assert seqs == (
                list(range(1, len(seqs) + 1)) if len(here.scheduler.hellos) == 1 else sorted(set(seqs))
            )
            status = worker.status()
            assert (status["num_accepted"], status["num_inflight"]) == (1, 0)
            assert worker.metric("quire_worker_output_tokens_total") == 16


async def test_prefill_and_decode_processes_hand_over_and_agree_with_colocated(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        first, second = here.worker("prefill"), here.worker("decode")
        first.start()
        async with here.gateway_to(second) as decode, here.gateway_to(first) as prefill:
            spec = SamplingSpec(max_tokens=20, temperature=0.8, seed=11)
            prompt = list(range(5, 40))
            to = HandoffTarget(handoff_id=HandoffId("h1"), target=InstanceId("decode-0"))
            prefill.generate("r", prompt, stage="prefill", sampling=spec, handoff_to=to)
            prefilled = await prefill.end_of("r")
            assert isinstance(prefilled, Prefilled)
            assert prefilled.handoff is not None
            assert prefilled.handoff.source == "prefill-0"
            decode.generate("r", prompt, stage="decode", sampling=spec, handoff=prefilled.handoff)
            assert isinstance(await decode.end_of("r"), Finished)
            decode.generate("c", prompt, sampling=spec)
            assert isinstance(await decode.end_of("c"), Finished)
            assert (
                decode.tokens["r", 0] == decode.tokens["c", 0] == here.vocabulary.tokens(prompt, 20, seed=11)
            )


async def test_64_streams_at_once_are_all_right(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here, here.gateway_to(here.worker()) as gateway:
        prompts = {f"r{i}": [3 + i, 9, 9, 9, 9] for i in range(64)}
        for request_id, prompt in prompts.items():
            gateway.generate(request_id, prompt, max_tokens=50)
        for request_id in prompts:
            assert isinstance(await gateway.end_of(request_id), Finished)
        for request_id, prompt in prompts.items():
            assert gateway.tokens[request_id, 0] == here.vocabulary.tokens(prompt, 50)
        assert len(gateway.messages) < 64 * 50 / 4, "tokens of one step travel together"


async def test_abort_stale_epoch_bad_frames_and_deadline(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        worker = here.worker(mock_step_ms=20)
        async with here.gateway_to(worker) as gateway:
            gateway.generate("gone", [1, 2], max_tokens=4000)
            await gateway.has_tokens("gone")
            gateway.abort("gone")
            gateway.generate("stale", [1], epoch=gateway.epoch - 1)
            gateway.generate("odd", [], raw=[b"abc"])
            gateway.generate("late", [3, 4], max_tokens=4000, deadline_ms=100)
            codes = {}
            for request_id in ("stale", "odd", "late"):
                end = await gateway.end_of(request_id)
                assert isinstance(end, Failed)
                codes[request_id] = end.code
            assert codes == {"stale": "epoch.stale", "odd": "invalid_request", "late": "peer.timeout"}
            await until(lambda: worker.status()["num_running"] == 0, "an empty engine")
            assert "gone" not in gateway.ends


async def test_sigterm_finishes_what_runs_says_goodbye_and_leaves(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        worker = here.worker(mock_step_ms=10)
        async with here.gateway_to(worker) as gateway:
            gateway.generate("r", [1, 2], max_tokens=800)  # eight seconds, in which all of this happens
            await gateway.has_tokens("r")
            worker.signal(signal.SIGTERM)
            await until(lambda: here.scheduler.goodbyes, "goodbye")
            gateway.generate("new", [1, 2])
            refused = await gateway.end_of("new")
            assert isinstance(refused, Failed)
            assert (refused.code, refused.retryable) == ("draining", True)
            host, port = worker.admin_url.removeprefix("http://").split(":")
            assert await in_flight(host, int(port), "/ready", timeout_s=30) == 1
            assert isinstance(await gateway.end_of("r"), Finished)
            assert gateway.tokens["r", 0] == here.vocabulary.tokens([1, 2], 800)
            assert await asyncio.to_thread(worker.wait) == 0
            assert here.coordinator.left == ["decode-0"]


async def test_what_does_not_finish_before_the_drain_deadline_fails_retryably(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        worker = here.worker(mock_step_ms=20, drain_deadline_ms=150)
        async with here.gateway_to(worker) as gateway:
            gateway.generate("r", [1, 2], max_tokens=4000)
            await gateway.has_tokens("r")
            worker.signal(signal.SIGTERM)
            end = await gateway.end_of("r")
            assert isinstance(end, Failed)
            assert (end.code, end.retryable) == ("draining", True)
            assert await asyncio.to_thread(worker.wait) == 0


async def test_a_killed_worker_comes_back_under_a_larger_epoch_and_refuses_the_old_one(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        worker = here.worker()
        async with here.gateway_to(worker) as gateway:
            old = gateway.epoch
            gateway.generate("r", [1, 2], max_tokens=4000)
            await gateway.has_tokens("r")
            await asyncio.to_thread(worker.kill)
            await until(lambda: not gateway.link.up, "the loss of the link")
        async with here.gateway_to(worker) as gateway:
            assert gateway.epoch > old
            gateway.generate("s", [1, 2], epoch=old)
            end = await gateway.end_of("s")
            assert isinstance(end, Failed)
            assert end.code == "epoch.stale"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mock_die_after_tokens": 5}, "engine_died"),
        ({"mock_hang_after_tokens": 5, "engine_silent_ms": 2_000}, "the engine has not answered for 2 s"),
    ],
    ids=["dies", "hangs"],
)
async def test_an_engine_that_fails_its_requests_ends_with_the_process(model_dir, tmp_path, settings, said):
    async with world(model_dir, tmp_path) as here:
        worker = here.worker(**settings)
        async with here.gateway_to(worker) as gateway:
            gateway.generate("r", [1, 2], max_tokens=4000)
            end = await gateway.end_of("r")
            assert isinstance(end, Failed)
            assert (end.code, end.retryable) == ("peer.gone", True)
            assert await asyncio.to_thread(worker.wait) == 1
            assert said in worker.log()


@pytest.mark.parametrize("broken", ["_update_gauges", "load"])
async def test_a_bug_in_the_background_fails_what_runs_and_ends_the_process(model_dir, tmp_path, broken):
    """A worker that looks at its engine no more would be asked for ever. `load` is also in the state that it logs."""
    file = tmp_path / "broken"
    words = f"""
import os, sys
from services.decode import __main__ as decode
from shared.engine.worker_shell import WorkerShell
before = WorkerShell.{broken}
def bug(shell):
    if os.path.exists({str(file)!r}):
        raise KeyError("our bug")
    return before(shell)
WorkerShell.{broken} = bug
decode.worker_main.leave(decode.main(sys.argv[1:]))
"""
    async with world(model_dir, tmp_path) as here:
        worker = here.worker(mock_step_ms=10)
        worker.command = [sys.executable, "-c", words, *worker.command[3:]]
        async with here.gateway_to(worker) as gateway:
            gateway.generate("r", [1, 2], max_tokens=4000)
            await gateway.has_tokens("r")
            file.touch()
            end = await gateway.end_of("r")
            assert isinstance(end, Failed)
            assert (end.code, end.retryable) == ("peer.gone", True)
            assert await asyncio.to_thread(worker.wait) == EXIT_BUG
            assert "our bug" in worker.log()
            assert here.coordinator.left == ["decode-0"]


async def test_without_a_coordinator_a_worker_waits_and_says_so(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        await here.coordinator.stop()
        worker = here.worker().start()
        await until(lambda: get_json(f"{worker.admin_url}/ready")[0] == 503, "/ready answers 503")

        def says_why():
            code, state = get_json(f"{worker.admin_url}/ready")
            return code == 503 and state["coordinator_problem"]

        await until(says_why, "a reason")
        await here.coordinator.start()
        async with here.gateway_to(worker) as gateway:
            gateway.generate("r", [1, 2])
            assert isinstance(await gateway.end_of("r"), Finished)


async def test_a_ready_worker_is_known_to_the_scheduler(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        here.scheduler.answer_hello = None
        worker = here.worker().start()
        await until(lambda: here.scheduler.hellos, "hello")
        code, state = get_json(f"{worker.admin_url}/ready")
        assert (code, state["phase"]) == (503, "introduced")
        here.scheduler.answer_hello = Welcome(report_interval_ms=50)
        await until(lambda: here.scheduler.reports, "a report")
        _, epoch = await here.ready(worker)
        assert here.scheduler.reports[0].epoch == epoch


async def test_an_absent_scheduler_keeps_no_worker_from_being_ready(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        here.scheduler.close()
        async with here.gateway_to(here.worker()) as gateway:
            gateway.generate("r", [1, 2])
            assert isinstance(await gateway.end_of("r"), Finished)


async def test_losing_the_coordinator_loses_nothing_and_its_amnesia_is_healed(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        worker = here.worker(mock_step_ms=10)
        async with here.gateway_to(worker) as gateway:
            gateway.generate("r", [1, 2], max_tokens=150)
            await gateway.has_tokens("r")
            await here.coordinator.stop()
            await asyncio.sleep(0.4)
            assert get_json(f"{worker.admin_url}/ready")[0] == 200
            gateway.generate("s", [3, 4])
            assert isinstance(await gateway.end_of("s"), Finished)
            here.coordinator.members.clear()
            old = gateway.epoch
            await here.coordinator.start()
            await until(lambda: "decode-0" in here.coordinator.members, "a new registration")
            epoch = here.coordinator.members["decode-0"][0]
            assert epoch > old
            await until(lambda: here.scheduler.hellos[-1].epoch == epoch, "hello under the new epoch")
            assert isinstance(await gateway.end_of("r"), Finished)


async def test_a_scheduler_that_forgot_gets_a_new_hello_and_a_stale_epoch_a_new_registration(
    model_dir, tmp_path
):
    async with world(model_dir, tmp_path) as here:
        worker = here.worker()
        await here.ready(worker)
        await until(lambda: here.scheduler.reports, "a report")
        here.scheduler.unknown = True
        await until(lambda: len(here.scheduler.hellos) >= 2, "a second hello")
        here.scheduler.refuse_next()
        await until(lambda: len(here.coordinator.registers) >= 2, "a second registration")
        here.scheduler.answer_hello = Welcome(report_interval_ms=50)
        count = len(here.scheduler.reports)

        def goes_on():
            later = here.scheduler.reports[count:]
            return later and later[-1].epoch == here.coordinator.members["decode-0"][0]

        await until(goes_on, "reports go on")


async def test_a_scheduler_that_comes_back_on_its_address_is_greeted(model_dir, tmp_path):
    async with world(model_dir, tmp_path) as here:
        await here.ready(here.worker())
        await until(lambda: here.scheduler.hellos, "hello")
        address = here.scheduler.address
        here.scheduler.close()
        here.scheduler = await ScriptedScheduler(address).start()
        await until(lambda: here.scheduler.reports, "reports to the new scheduler")
        assert here.scheduler.hellos


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--model-dir", "/nowhere"], "model_dir"),
        (["--max-num-sequences", "5"], "max-num-seqs"),
        (["--engine", "fake"], "engine"),
    ],
)
async def test_wrong_settings_end_with_2_and_name_the_key(model_dir, tmp_path, flags, text):
    base = ["--model-dir", str(model_dir), "--engine", "mock"]
    worker = ServiceProcess.of_module(
        "services.prefill", [*base, *flags], name="wrong", log_dir=tmp_path
    ).start()
    assert await asyncio.to_thread(worker.wait) == 2
    assert text in worker.log()
    assert "Traceback" not in worker.log()
