#!/bin/bash
# Sends SIGTERM to this node's agent when a cloud gives notice that it will take the machine away, so that all
# workers write a snapshot together, this node leaves, and the others go on. Run it beside the agent:
#
#   launch/elastic.sh ... & launch/notice.sh $!
#
# It asks the metadata services of AWS, Google and Azure every 5 s. Exit code 0: the machine will be taken
# away, and the agent has ended; 1: the agent has ended by itself; 2: a mistake in the options.
#
# METADATA_URL sets another address of the service, NOTICE_EVERY_S another interval in seconds.
set -u
agent=${1:-}
url=${METADATA_URL:-http://169.254.169.254}
every_s=${NOTICE_EVERY_S:-5}

if ! kill -0 "$agent" 2>/dev/null; then
    echo "error: launch/notice.sh takes the process id of this node's agent, got '$agent'" >&2
    exit 2
elif ! command -v curl >/dev/null; then
    echo "error: launch/notice.sh needs curl" >&2
    exit 2
fi

ask() { # PATH [OPTION OF CURL...]; fails without an answer, or if the answer is not a success
    curl --silent --fail --noproxy '*' --max-time 2 "${@:2}" "$url/$1"
}

aws() { # a recommendation to rebalance is no notice: the machine may stay
    local token
    token=$(ask latest/api/token -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60") || return
    ask latest/meta-data/spot/instance-action -H "X-aws-ec2-metadata-token: $token" | grep -q '"action"'
}

google() {
    local of=computeMetadata/v1/instance header="Metadata-Flavor: Google"
    ask $of/preempted -H "$header" | grep -qx TRUE ||
        ask $of/maintenance-event -H "$header" | grep -qx TERMINATE_ON_HOST_MAINTENANCE
}

azure() { # also lists events of the other machines of a scale set
    local name version="api-version=2020-07-01"
    name=$(ask "metadata/instance/compute/name?$version&format=text" -H "Metadata: true") || return
    ask "metadata/scheduledevents?$version" -H "Metadata: true" | tr -d '\n' | tr '}' '\n' |
        grep -E '"EventType": *"(Preempt|Terminate)"' | grep -qiE "\"Resources\": *\[[^]]*\"$name\""
}

while kill -0 "$agent" 2>/dev/null; do
    for cloud in aws google azure; do
        if $cloud; then
            echo "$cloud will take this machine: SIGTERM to the agent (process $agent)" >&2
            kill -TERM "$agent"
            while kill -0 "$agent" 2>/dev/null; do sleep 1; done
            exit 0
        fi
    done
    sleep "$every_s"
done
exit 1
