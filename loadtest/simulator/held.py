"""What a task holds of its engine's memory: entries of sealed blocks, pinned, and private tokens."""

from loadtest.simulator.blocks import ROOT, BlockStore, tokens_of
from loadtest.simulator.task import Task


def seal_prompt(store: BlockStore, task: Task, done_tokens: int) -> None:
    """Name the prompt's blocks that are written and have no name yet."""
    blocks = task.request.blocks
    have = len(task.entries)
    whole = done_tokens >= task.request.prompt_tokens
    upto = len(blocks) if whole else min(len(blocks), done_tokens // store.block_tokens)
    if upto <= have:
        return
    begin = have * store.block_tokens
    num_tokens = min(upto * store.block_tokens, task.request.prompt_tokens) - begin
    parent = blocks[have - 1] if have else ROOT
    task.entries += store.seal(parent, blocks[have:upto], num_tokens)
    task.private_tokens -= num_tokens


def keep_output(store: BlockStore, task: Task) -> None:
    """Name the blocks that decode completed."""
    request = task.request
    whole = request.prompt_tokens // store.block_tokens
    if not request.output_blocks:
        return
    num_tokens = len(request.output_blocks) * store.block_tokens
    free_private(store, task)
    if store.reserve(num_tokens):  # the tail's tokens are copied: the full block has a page of its own
        parent = request.blocks[whole - 1] if whole else ROOT
        task.entries += store.seal(parent, request.output_blocks, num_tokens)


def free_private(store: BlockStore, task: Task) -> None:
    """What it wrote and did not seal."""
    store.release(task.private_tokens)
    task.private_tokens = 0


def promise(store: BlockStore, task: Task) -> None:
    """It may come to have so much, until free()."""
    task.promised_tokens = task.final_tokens
    store.promised_tokens += task.promised_tokens


def free(store: BlockStore, task: Task) -> None:
    """All of it."""
    store.promised_tokens -= task.promised_tokens
    task.promised_tokens = 0
    free_private(store, task)
    store.unpin(task.entries)
    task.entries = []


def held_tokens(task: Task) -> int:
    """All of it."""
    return tokens_of(task.entries) + task.private_tokens


def lacking_tokens(task: Task, new: int) -> int:
    """Of memory for so many tokens more of its KV, beyond what it has."""
    return max(0, task.done_tokens + new - held_tokens(task))


def shared_tokens(task: Task) -> int:
    """Of its sealed blocks, the leading ones that somebody else uses too. Who pins a block pins all before it."""
    return tokens_of([entry for entry in task.entries if entry.pins > 1])


def keep_here(store: BlockStore, task: Task, kv_tokens: int, away_tokens: int) -> None:
    """Have private memory for what is neither away nor sealed of its KV. What this takes beyond before is free."""
    wanted = max(0, kv_tokens - away_tokens - tokens_of(task.entries))
    has_room = store.reserve(wanted - task.private_tokens)
    assert has_room, "counted before"
    task.private_tokens = wanted


def leave(store: BlockStore, task: Task, kv_tokens: int, away_tokens: int) -> None:
    """So many tokens of its KV are kept elsewhere: its own blocks may be evicted, its other memory is free."""
    num_shared = sum(entry.pins > 1 for entry in task.entries)
    store.unpin(task.entries[num_shared:])
    del task.entries[num_shared:]
    keep_here(store, task, kv_tokens, away_tokens)


def find_again(store: BlockStore, task: Task) -> None:
    """Pin whole blocks of its prompt that left, and that nobody has evicted since."""
    whole = task.request.blocks[: min(task.done_tokens, task.request.prompt_tokens) // store.block_tokens]
    found = store.match(whole)[len(task.entries) :]
    store.pin(found)
    task.entries += found
