#!/bin/sh
# Makes the secrets that docker-compose.yml mounts, each in a file that one user can read:
#
#   sudo sh deploy/make-secrets.sh [FOLDER]
#
# FOLDER is ./secrets if not given. A file that exists is left as it is, so that it may be run again.
# The numbers are the users inside the images: HEADSTART_OWNER of ours, REDIS_OWNER of Redis,
# PROMETHEUS_OWNER and GRAFANA_OWNER of these.
set -eu
umask 077
folder=${1:-secrets}
headstart_owner=${HEADSTART_OWNER:-10001:10001}
redis_owner=${REDIS_OWNER:-999:999}
prometheus_owner=${PROMETHEUS_OWNER:-65534:65534}
grafana_owner=${GRAFANA_OWNER:-472:472}

random() {
  head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'
}

# keep NAME OWNER: standard input becomes the file, readable by its owner alone.
keep() {
  cat > "$folder/.$1.new"
  chmod 0400 "$folder/.$1.new"
  chown "$2" "$folder/.$1.new" || {
    rm -f "$folder/.$1.new"
    echo "cannot give $folder/$1 to user $2: run this as root" >&2
    exit 1
  }
  mv "$folder/.$1.new" "$folder/$1"
  echo "made $folder/$1"
}

mkdir -p "$folder"
chmod 0755 "$folder" # the names are no secret; each file has its own guard
for name in link-secret api-keys admin-keys encryption-key; do
  if [ ! -e "$folder/$name" ]; then
    echo "$(random)" | keep "$name" "$headstart_owner"
  fi
done
# Both sides of one password: a new one needs both files.
if [ ! -e "$folder/redis-url" ] || [ ! -e "$folder/redis.conf" ]; then
  password=$(random)
  echo "redis://:$password@redis:6379/0" | keep redis-url "$headstart_owner"
  echo "requirepass $password" | keep redis.conf "$redis_owner"
fi
if [ ! -e "$folder/grafana-password" ]; then
  echo "$(random)" | keep grafana-password "$grafana_owner"
fi
# The first of the clients' keys, for Prometheus: another first key needs another file.
key=$(head -n 1 "$folder/api-keys")
if [ ! -e "$folder/metrics-key" ] || [ "$(cat "$folder/metrics-key")" != "$key" ]; then
  echo "$key" | keep metrics-key "$prometheus_owner"
fi
