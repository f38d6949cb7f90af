#!/bin/sh
# Make the secrets that the services share, in deploy/secrets; what is there stays as it is.
set -eu
umask 077
cd "$(dirname "$0")"
folder=${1:-secrets}
mkdir -p "$folder"
chmod 700 "$folder"
cd "$folder"

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

if [ ! -s postgres_password ]; then
    random >postgres_password
fi
# What libpq reads: its password file would have to belong to whoever reads it.
printf '[dagster]\npassword=%s\n' "$(cat postgres_password)" >pg_service.conf

if [ ! -s s3_identities.json ] || [ ! -s s3_credentials ]; then
    key=$(random) secret=$(random)
    printf '[default]\naws_access_key_id=%s\naws_secret_access_key=%s\n' "$key" "$secret" >s3_credentials
    printf '{"identities":[{"name":"tensorize","actions":["Admin"],"credentials":[{"accessKey":"%s","secretKey":"%s"}]}]}\n' \
        "$key" "$secret" >s3_identities.json
fi

if [ ! -s webhook_secret ]; then
    random >webhook_secret
fi

# Each is mounted alone into the services that need it, which run as other users; on this host the
# folder keeps everybody else out.
chmod 644 ./*
