"""An engine that warms up on a pool which is in use changes none of its pages."""

from types import SimpleNamespace

from shared.engine.page_warmup import use_null_block


def test_requests_that_vllm_makes_up_write_the_null_block_only():
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=([1, 2],)), SimpleNamespace(block_ids=([3],))],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([4],), ([],)]),
    )
    use_null_block(output)
    assert [new.block_ids for new in output.scheduled_new_reqs] == [([0, 0],), ([0],)]
    assert output.scheduled_cached_reqs.new_block_ids == [None, ([0],), ([],)]
