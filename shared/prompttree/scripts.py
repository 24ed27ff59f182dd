"""Who holds which prefix, in Redis: the keys and the Lua scripts.

    quire:pt:owners                    hash: instance -> "<tag> <epoch> <role>"
    quire:pt:held:<instance>:<tag>     set of 16-byte block hashes, and one marker; it has the TTL

Every instance writes its own set only. The tag (16 hex digits, random) names one publication of its blocks:
a new epoch, an emptied cache or a lost Redis gets a new tag, which ends the old publication in O(1); the old
set is unlinked or expires. The TTL is on the set, so a refresh is O(1) too, and a dead owner vanishes whole.

Block hashes are chained over the prefix and seeded by the model's fingerprint and the tenant's salt, so one
flat space serves all models and tenants. 16 of their 32 bytes are kept: hits are hints, and bytes of KV are
used only after the owner matched the whole hash. Why sets: 256 blocks are one SADD (85 us, 40 B a block);
a key with a TTL per block takes 410 us and 90 B. Keys are computed inside the scripts: no Redis Cluster.
"""

from shared.transport.redis_link import Script

SHORT_HASH_BYTES = 16
MAX_BATCH_BLOCKS = 1024  # struct.unpack returns them on Lua's C stack, which holds 8,000
TAG_HEX = 16

_COMMON = """
local call, sub = redis.call, string.sub
local OWNERS = 'quire:pt:owners'
local function held(instance, tag) return 'quire:pt:held:' .. instance .. ':' .. tag end
local function unpacked(blob)
  local hashes = {struct.unpack(string.rep('c16', #blob / 16), blob)}
  hashes[#hashes] = nil  -- the position after the last one
  return unpack(hashes)
end
local function row_epoch(row) return tonumber(string.match(row, '^%x+ (%d+)') or 0) end
"""

# 'lost' also when the set was evicted or expired: then the publication is over.
_GUARD = """
local function check(instance, epoch, tag)
  local row = call('HGET', OWNERS, instance)
  if not row then return 'lost' end
  if row_epoch(row) > tonumber(epoch) then return 'stale' end
  if sub(row, 1, 16) ~= tag or call('EXISTS', held(instance, tag)) == 0 then return 'lost' end
  return 'ok'
end
"""

# ARGV: concatenated short hashes, first block first. Reply: instance, depth, instance, depth, ...
# The set of an owner is closed under prefixes (engines evict leaves first), so the deepest block is found by
# doubling steps and halving; owners often agree, so the last depth is tried first.
LOOKUP = Script(
    _COMMON
    + """
local blob = ARGV[1]
local n = #blob / 16
local rows = call('HGETALL', OWNERS)
local out, guess = {}, 0
for r = 1, #rows, 2 do
  local key = held(rows[r], sub(rows[r + 1], 1, 16))
  local function has(i) return call('SISMEMBER', key, sub(blob, i * 16 - 15, i * 16)) == 1 end
  local low, high = 0, n + 1
  if guess > 0 then
    if has(guess) then
      low = guess
      if guess < n and not has(guess + 1) then high = guess + 1 end
    else
      high = guess
    end
  end
  local step = 1
  while high - low > 1 do
    local probe = low + step
    if probe >= high then probe = math.floor((low + high) / 2) end
    if has(probe) then low = probe; step = step * 2 else high = probe; step = n end
  end
  if low > 0 then
    out[#out + 1] = rows[r]
    out[#out + 1] = low
    guess = low
  end
end
return out
"""
)

# ARGV: instance, epoch, role, tag, ttl_s. Begins a publication and ends the instance's last one.
CLAIM = Script(
    _COMMON
    + """
local instance, epoch, role, tag, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local row = call('HGET', OWNERS, instance)
if row then
  if row_epoch(row) > tonumber(epoch) then return 'stale' end
  call('UNLINK', held(instance, sub(row, 1, 16)))
end
call('HSET', OWNERS, instance, tag .. ' ' .. epoch .. ' ' .. role)
call('SADD', held(instance, tag), 'marker')
call('EXPIRE', held(instance, tag), ttl)
return 'ok'
"""
)

# ARGV: instance, epoch, tag, stored hashes, removed hashes.
WRITE = Script(
    _COMMON
    + _GUARD
    + """
local verdict = check(ARGV[1], ARGV[2], ARGV[3])
if verdict ~= 'ok' then return verdict end
local key = held(ARGV[1], ARGV[3])
if #ARGV[4] > 0 then call('SADD', key, unpacked(ARGV[4])) end
if #ARGV[5] > 0 then call('SREM', key, unpacked(ARGV[5])) end
return 'ok'
"""
)

# ARGV: instance, epoch, tag, ttl_s. Reply: number of blocks held, so that the owner notices a difference.
# It also drops the rows of owners whose sets are gone; one that lives after all claims again.
BEAT = Script(
    _COMMON
    + _GUARD
    + """
local verdict = check(ARGV[1], ARGV[2], ARGV[3])
if verdict ~= 'ok' then return verdict end
local key = held(ARGV[1], ARGV[3])
call('EXPIRE', key, ARGV[4])
local rows = call('HGETALL', OWNERS)
for r = 1, #rows, 2 do
  if call('EXISTS', held(rows[r], sub(rows[r + 1], 1, 16))) == 0 then call('HDEL', OWNERS, rows[r]) end
end
return call('SCARD', key) - 1
"""
)

# ARGV: instance, epoch, tag. Orderly end.
RELEASE = Script(
    _COMMON
    + _GUARD
    + """
if check(ARGV[1], ARGV[2], ARGV[3]) ~= 'ok' then return 'lost' end
call('UNLINK', held(ARGV[1], ARGV[3]))
call('HDEL', OWNERS, ARGV[1])
return 'ok'
"""
)
