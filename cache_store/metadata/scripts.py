"""The programs that Redis runs: each is one round trip, and nothing comes between its commands.

Owns their text. ``ARGV[1]`` is the prefix of all keys, since they name records by what they find
in others (so a Redis Cluster does not run them). Whatever lies under one of our keys and is of
another type was not written by this version: reading takes it for absent, writing replaces it. The
first command that writes is one that takes memory, since Redis refuses that one when it is full and
lets a program that has begun to write go on.
"""

from __future__ import annotations

__all__ = ["COUNT", "DELETE", "LIST", "LOCATE", "PUT", "REMOVE_WORKER", "RENEW", "WORKERS"]

_COMMON = """
local prefix = ARGV[1]
local function is(key, kind) return redis.call('TYPE', key).ok == kind end
local function own(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function keep_until(key, at_ms)
  if redis.call('PTTL', key) < at_ms - now_ms() then redis.call('PEXPIREAT', key, at_ms) end
end
"""

# prefix, worker, epoch, endpoint, model, lease in ms
RENEW = (
    _COMMON
    + """
local id, epoch, endpoint, model, lease = ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local key, all = prefix .. 'worker:' .. id, prefix .. 'workers'
local of_model = all .. ':' .. model
own(key, 'hash')
local old = redis.call('HMGET', key, 'epoch', 'model')
if old[1] and old[2] and (old[1] ~= epoch or old[2] ~= model) then
  redis.call('DEL', prefix .. 'chunks:' .. old[2] .. ':' .. id .. ':' .. old[1])
  if old[2] ~= model and is(prefix .. 'workers:' .. old[2], 'zset') then
    redis.call('ZREM', prefix .. 'workers:' .. old[2], id)
  end
end
redis.call('HSET', key, 'epoch', epoch, 'model', model, 'endpoint', endpoint)
redis.call('PEXPIRE', key, lease)
local now = now_ms()
for _, index in ipairs({all, of_model}) do
  own(index, 'zset')
  redis.call('ZREMRANGEBYSCORE', index, '-inf', now)
  redis.call('ZADD', index, now + lease, id)
  keep_until(index, now + lease)
end
redis.call('PEXPIRE', prefix .. 'chunks:' .. model .. ':' .. id .. ':' .. epoch, lease)
return 1
"""
)

# prefix, worker
REMOVE_WORKER = (
    _COMMON
    + """
local id = ARGV[2]
local key = prefix .. 'worker:' .. id
if is(key, 'hash') then
  local old = redis.call('HMGET', key, 'epoch', 'model')
  if old[1] and old[2] then
    redis.call('DEL', prefix .. 'chunks:' .. old[2] .. ':' .. id .. ':' .. old[1])
    if is(prefix .. 'workers:' .. old[2], 'zset') then
      redis.call('ZREM', prefix .. 'workers:' .. old[2], id)
    end
  end
end
if is(prefix .. 'workers', 'zset') then redis.call('ZREM', prefix .. 'workers', id) end
return redis.call('DEL', key)
"""
)

# Of an index, at most so many: Redis answers nobody else meanwhile.
_LIVE_WORKERS = """
local index, result = prefix .. ARGV[2], {}
if not is(index, 'zset') then return result end
local ids = redis.call('ZRANGEBYSCORE', index, now_ms(), '+inf', 'LIMIT', 0, 1024)
"""

# prefix, index -> {worker, epoch, endpoint, model}
WORKERS = (
    _COMMON
    + _LIVE_WORKERS
    + """
for _, id in ipairs(ids) do
  local key = prefix .. 'worker:' .. id
  if is(key, 'hash') then
    local worker = redis.call('HMGET', key, 'epoch', 'endpoint', 'model')
    local is_listed = worker[3] and (ARGV[2] == 'workers' or ARGV[2] == 'workers:' .. worker[3])
    if worker[1] and worker[2] and is_listed then
      result[#result + 1] = {id, worker[1], worker[2], worker[3]}
    end
  end
end
return result
"""
)

# Most workers hold none of a prompt: the first look is at one chunk, the next at more and more.
# prefix, index of the model, model, chunk hashes -> {worker, epoch, one tier letter per chunk held}
LOCATE = (
    _COMMON
    + _LIVE_WORKERS
    + """
local model, joined, hashes = ARGV[3], ARGV[4], {}
for start = 1, #joined - 15, 16 do hashes[#hashes + 1] = string.sub(joined, start, start + 15) end
for _, id in ipairs(ids) do
  local worker = prefix .. 'worker:' .. id
  local epoch = is(worker, 'hash') and redis.call('HGET', worker, 'epoch')
  local chunks = epoch and prefix .. 'chunks:' .. model .. ':' .. id .. ':' .. epoch
  if chunks and is(chunks, 'hash') then
    local tiers, first, batch = {}, 1, 1
    while first <= #hashes do
      local last = math.min(first + batch - 1, #hashes)
      local found = redis.call('HMGET', chunks, unpack(hashes, first, last))
      local size = last - first + 1
      for index = 1, size do
        if not found[index] then size = index - 1 break end
        tiers[#tiers + 1] = found[index]
      end
      if size < last - first + 1 then break end
      first, batch = last + 1, math.min(4 * batch, 256)
    end
    if #tiers > 0 then result[#result + 1] = {id, epoch, table.concat(tiers)} end
  end
end
return result
"""
)

# prefix, tenant, session, expected version, new version, expiry in ms, meta, history,
# id of this write, ids of earlier writes that count as expected -> whether it was stored
PUT = (
    _COMMON
    + """
local tenant, id, expires = ARGV[2], ARGV[3], tonumber(ARGV[6])
local key = prefix .. 'session:' .. tenant .. ':' .. id
local of_tenant, all = prefix .. 'sessions:' .. tenant, prefix .. 'sessions'
own(of_tenant, 'zset')
own(all, 'zset')
local version = '0'
if is(key, 'hash') then
  local found = redis.call('HMGET', key, 'version', 'write')
  version = found[1] or '0'
  for index = 9, #ARGV do
    if found[2] and found[2] == ARGV[index] then version = ARGV[4] end
  end
end
if version ~= ARGV[4] then return 0 end
own(key, 'hash')
redis.call('HSET', key, 'version', ARGV[5], 'meta', ARGV[7], 'history', ARGV[8], 'write', ARGV[9])
redis.call('PEXPIREAT', key, expires)
redis.call('ZADD', of_tenant, 0, id)
redis.call('ZADD', all, expires, tenant .. ':' .. id)
keep_until(of_tenant, expires)
keep_until(all, expires)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', now_ms(), 'LIMIT', 0, 100)) do
  local colon = string.find(gone, ':', 1, true)
  redis.call('ZREM', all, gone)
  local old = colon and prefix .. 'sessions:' .. string.sub(gone, 1, colon - 1)
  if old and is(old, 'zset') then redis.call('ZREM', old, string.sub(gone, colon + 1)) end
end
return 1
"""
)

# prefix, tenant, session -> {version, meta, history}
DELETE = (
    _COMMON
    + """
local tenant, id = ARGV[2], ARGV[3]
local key = prefix .. 'session:' .. tenant .. ':' .. id
local found = {}
if is(key, 'hash') then found = redis.call('HMGET', key, 'version', 'meta', 'history') end
redis.call('DEL', key)
local of_tenant, all = prefix .. 'sessions:' .. tenant, prefix .. 'sessions'
if is(of_tenant, 'zset') then redis.call('ZREM', of_tenant, id) end
if is(all, 'zset') then redis.call('ZREM', all, tenant .. ':' .. id) end
return found
"""
)

# prefix, tenant, where to begin (as ZRANGEBYLEX takes it), limit -> {session, version, meta}
LIST = (
    _COMMON
    + """
local tenant, result = ARGV[2], {}
local of_tenant = prefix .. 'sessions:' .. tenant
if not is(of_tenant, 'zset') then return result end
for _, id in ipairs(redis.call('ZRANGEBYLEX', of_tenant, ARGV[3], '+', 'LIMIT', 0, ARGV[4])) do
  local key = prefix .. 'session:' .. tenant .. ':' .. id
  local found = is(key, 'hash') and redis.call('HMGET', key, 'version', 'meta') or {}
  result[#result + 1] = {id, found[1] or false, found[2] or false}
end
return result
"""
)

# prefix -> number of sessions whose time has not run out
COUNT = (
    _COMMON
    + """
local all = prefix .. 'sessions'
if not is(all, 'zset') then return 0 end
return redis.call('ZCOUNT', all, '(' .. string.format('%.0f', now_ms()), '+inf')
"""
)
