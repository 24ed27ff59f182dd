"""Who holds which prefix, in Redis: the keys and the Lua scripts.

    quire:pt:owners                    hash: instance -> "<tag> <epoch> <role>"
    quire:pt:spaces                    hash: a mempool's space -> "<tag> <epoch> <behind> <audience>" (hits.py)
    quire:pt:held:<owner>:<tag>        set of 16-byte block hashes, and one marker; it has the TTL
    quire:pt:version                   grows with every retraction, for gateways that remember look-ups
    quire:pt:fence:<table>:<owner>     epoch of a row that is gone, or of who was told "covered" instead of getting one,
                                       for a day: no older process claims the name

Every owner (an engine's instance, or a space of a mempool) writes its own set only. The tag (16 hex digits, random)
names one publication of its blocks: a new epoch, an emptied cache or a lost Redis gets a new tag, which ends the
old publication in O(1); the old set is unlinked or expires. The TTL is on the set, so a refresh is O(1) too, and a
dead owner vanishes whole. Rows are the trees: one for each prefill, decode and colocated instance, and for each space.

A space of a GPU may have host memory behind it (`behind` names that space's row, whose own `behind` is "dram"). Blocks
leave a space leaves first and go there, so the two together hold prefixes, while the host memory alone may lack
their heads: the look-up goes on in it from where the space ends.

An engine that works in the pages of a space holds nothing that the space does not: once the space's row names it as
"hbm", its own tree is *covered*, and withdrawn. Should the space's entries end, or only remember it (hits.py), the
engine publishes its own again.

Block hashes are chained over the prefix and seeded by the model's fingerprint and the tenant's salt, so one
flat space serves all models and tenants. 16 of their 32 bytes are kept: hits are hints, and bytes of KV are
used only after the owner matched the whole hash. Why sets: 256 blocks are one SADD (85 us, 40 B a block);
a key with a TTL per block takes 410 us and 90 B. Keys are computed inside the scripts: no Redis Cluster.
"""

from shared.transport.redis_link import Script

SHORT_HASH_BYTES = 16
MAX_BATCH_BLOCKS = 1024  # struct.unpack returns them on Lua's C stack, which holds 8,000
TAG_HEX = 16
OWNERS = "owners"  # engines
SPACES = "spaces"  # of mempools
IS_DRAM = "dram"  # `behind` of memory that is itself behind others
NONE_BEHIND = "-"
FENCE_S = 86_400  # an older process that is still there after a day would be heard

_COMMON = """
local call, sub = redis.call, string.sub
local VERSION = 'quire:pt:version'
local function held(owner, tag) return 'quire:pt:held:' .. owner .. ':' .. tag end
local function unpacked(blob)
  local hashes = {struct.unpack(string.rep('c16', #blob / 16), blob)}
  hashes[#hashes] = nil  -- the position after the last one
  return unpack(hashes)
end
local function row_epoch(row) return tonumber(string.match(row, '^%x+ (%d+)') or 0) end
"""

# Before a row goes: its owner's epoch outlives it.
_FENCE = f"""
local function fence_key(owner) return 'quire:pt:fence:' .. ARGV[1] .. ':' .. owner end
local function fence_of(owner) return tonumber(call('GET', fence_key(owner)) or 0) end
local function keep_fence(owner, epoch)
  if tonumber(epoch) >= fence_of(owner) then call('SET', fence_key(owner), epoch, 'EX', {FENCE_S}) end
end
"""

# 'lost' also when the set was evicted or expired: then the publication is over.
_GUARD = """
local ROWS = 'quire:pt:' .. ARGV[1]
local function check(owner, epoch, tag)
  local row = call('HGET', ROWS, owner)
  if not row then return 'lost' end
  if row_epoch(row) > tonumber(epoch) then return 'stale' end
  if sub(row, 1, 16) ~= tag or call('EXISTS', held(owner, tag)) == 0 then return 'lost' end
  return 'ok', row
end
"""

# Whether a space speaks for an engine: one that is attached there now. The separator and the letter are hits.py's.
_COVERED = """
local function covered(owner)
  if ARGV[1] ~= 'owners' then return false end
  local rows = call('HGETALL', 'quire:pt:spaces')
  for r = 1, #rows, 2 do
    local audience = string.match(rows[r + 1], '^%x+ %d+ %S+ (.*)$')
    if audience and string.find('\\31' .. audience .. '\\31', '\\31h' .. owner .. '\\31', 1, true)
      and call('EXISTS', held(rows[r], sub(rows[r + 1], 1, 16))) == 1 then
      return true
    end
  end
  return false
end
local function withdraw(owner, row)
  keep_fence(owner, string.match(row, '^%x+ (%d+)') or 0)
  call('UNLINK', held(owner, sub(row, 1, 16)))
  call('HDEL', 'quire:pt:' .. ARGV[1], owner)
  call('INCR', VERSION)
end
"""

# ARGV: concatenated short hashes, first block first.
# Reply: {instance, depth, instance, depth, ...}, {depth in the space, with what is behind it, audience, ...}, version,
# audience of all: everybody in any row, engines in theirs, told only where an audience before remembers somebody (such
# begin with a capital), who may live elsewhere, in a row that has nothing of the prompt.
# What an owner holds is closed under prefixes (leaves are evicted first), so the deepest block is found by
# steps that grow and halving: by 16, as those that double take as many commands as the halving behind them. (SMISMEMBER
# of several blocks takes longer: what Lua makes of its words and its reply costs more than the commands saved.) Owners
# often agree, so the last depth is tried first, or, where the last owner had another one, the first block: most owners
# of many lack it, which costs one command. Spaces with one memory behind them that end at one block go on alike.
LOOKUP = Script(
    _COMMON
    + """
local blob = ARGV[1]
local n = #blob / 16
local floor = math.floor
local agrees = true  -- whether the last owner that was asked has the guessed depth
local function has(key, i) return call('SISMEMBER', key, sub(blob, i * 16 - 15, i * 16)) == 1 end
local function last(key, low, high)
  local step = 16
  while high - low > 1 do
    local probe = low + step
    if probe >= high then probe = floor((low + high) / 2) end
    if has(key, probe) then low = probe; step = step * 16 else high = probe; step = n end
  end
  return low
end
local first = sub(blob, 1, 16)
local function deepest(key, guess)
  local low, high = 0, n + 1
  if not agrees then
    if call('SISMEMBER', key, first) == 0 then return 0 end
    low = 1
  end
  if guess > low then
    agrees = has(key, guess)
    if agrees then
      low = guess
      if guess < n and not has(key, guess + 1) then return low end
    else
      high = guess
    end
  end
  if low == 0 then
    if high == 1 or call('SISMEMBER', key, first) == 0 then return 0 end
    low = 1
  end
  return last(key, low, high)
end
local engines, spaces, guess = {}, {}, 0
local owners, rows = call('HGETALL', 'quire:pt:owners'), call('HGETALL', 'quire:pt:spaces')
for r = 1, #owners, 2 do
  local low = deepest('quire:pt:held:' .. owners[r] .. ':' .. sub(owners[r + 1], 1, 16), guess)
  if low > 0 then
    engines[#engines + 1] = owners[r]
    engines[#engines + 1] = low
    guess = low
  end
end
local keys, beyond, audiences, remembers = {}, {}, {}, false
for r = 1, #rows, 2 do keys[rows[r]] = held(rows[r], sub(rows[r + 1], 1, 16)) end
for r = 1, #rows, 2 do
  local behind, audience = string.match(rows[r + 1], '^%x+ %d+ (%S+) (.*)$')
  if audience and behind ~= 'dram' then
    local own = deepest(keys[rows[r]], guess)
    local all = own
    if own > 0 then guess = own end
    if own < n and keys[behind] then
      local from = behind .. ' ' .. own
      all = beyond[from]
      if not all then
        all = has(keys[behind], own + 1) and last(keys[behind], own + 1, n + 1) or own
        beyond[from] = all
      end
    end
    if all > 0 then
      spaces[#spaces + 1] = own
      spaces[#spaces + 1] = all
      spaces[#spaces + 1] = audience
      remembers = remembers or string.find(audience, '^[HD]')
    end
    audiences[#audiences + 1] = audience
  end
end
local everybody = ''
if remembers then
  for r = 1, #owners, 2 do audiences[#audiences + 1] = 'h' .. owners[r] end
  everybody = table.concat(audiences, '\\31')
end
return {engines, spaces, tonumber(call('GET', VERSION) or 0), everybody}
"""
)

# ARGV: table, owner, epoch, tag, ttl_s, rest of the row. Begins a publication and ends the owner's last one; 'covered':
# there is none to begin.
CLAIM = Script(
    _COMMON
    + _FENCE
    + _COVERED
    + """
local ROWS = 'quire:pt:' .. ARGV[1]
local owner, epoch, tag, ttl, rest = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if fence_of(owner) > tonumber(epoch) then return 'stale' end
local row = call('HGET', ROWS, owner)
if row then
  if row_epoch(row) > tonumber(epoch) then return 'stale' end
  withdraw(owner, row)
end
if covered(owner) then
  keep_fence(owner, epoch)
  return 'covered'
end
call('HSET', ROWS, owner, tag .. ' ' .. epoch .. ' ' .. rest)
call('SADD', held(owner, tag), 'marker')
call('EXPIRE', held(owner, tag), ttl)
return 'ok'
"""
)

# ARGV: table, owner, epoch, tag, stored hashes, removed hashes.
WRITE = Script(
    _COMMON
    + _GUARD
    + """
local verdict = check(ARGV[2], ARGV[3], ARGV[4])
if verdict ~= 'ok' then return verdict end
local key = held(ARGV[2], ARGV[4])
if #ARGV[5] > 0 then call('SADD', key, unpacked(ARGV[5])) end
if #ARGV[6] > 0 then
  call('SREM', key, unpacked(ARGV[6]))
  call('INCR', VERSION)
end
return 'ok'
"""
)

# ARGV: table, owner, epoch, tag, ttl_s, rest of the row, "1" to sweep. Reply: number of blocks held, so that the
# owner notices a difference. A sweep drops rows of owners whose sets are gone; one that lives after all claims again.
# 'covered': the publication is over, nobody needs it.
BEAT = Script(
    _COMMON
    + _GUARD
    + _FENCE
    + _COVERED
    + """
local verdict, row = check(ARGV[2], ARGV[3], ARGV[4])
if verdict ~= 'ok' then return verdict end
if covered(ARGV[2]) then
  withdraw(ARGV[2], row)
  return 'covered'
end
local key = held(ARGV[2], ARGV[4])
call('EXPIRE', key, ARGV[5])
local now = ARGV[4] .. ' ' .. ARGV[3] .. ' ' .. ARGV[6]
if row ~= now then call('HSET', ROWS, ARGV[2], now) end
if ARGV[7] == '1' then
  local rows = call('HGETALL', ROWS)
  for r = 1, #rows, 2 do
    if call('EXISTS', held(rows[r], sub(rows[r + 1], 1, 16))) == 0 then
      keep_fence(rows[r], string.match(rows[r + 1], '^%x+ (%d+)') or 0)
      call('HDEL', ROWS, rows[r])
    end
  end
end
return call('SCARD', key) - 1
"""
)

# ARGV: table, owner, epoch, tag. Orderly end.
RELEASE = Script(
    _COMMON
    + _GUARD
    + _FENCE
    + """
if check(ARGV[2], ARGV[3], ARGV[4]) ~= 'ok' then return 'lost' end
keep_fence(ARGV[2], ARGV[3])
call('UNLINK', held(ARGV[2], ARGV[4]))
call('HDEL', ROWS, ARGV[2])
call('INCR', VERSION)
return 'ok'
"""
)
