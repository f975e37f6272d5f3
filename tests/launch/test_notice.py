"""launch/notice.sh against a metadata service on this machine that answers like those of the clouds."""

import http.server
import os
import subprocess
from http import HTTPStatus
from signal import SIGKILL, SIGTERM

import pytest
from support.jobs import ROOT, wait_until
from support.web import serving

Answers = dict[tuple[str, str, str], str]  # (request, header that it needs, value of the header): content
TOKEN = "PUT /latest/api/token", "x-aws-ec2-metadata-token-ttl-seconds", "60"
EVENTS = """{"DocumentIncarnation": 2, "Events": [
{"EventId": "1", "EventType": "Freeze", "Resources": ["gpt_1"], "NotBefore": ""},
{"EventId": "2", "EventType": "%s",
 "Resources": ["gpt_2", "%s"]}]}"""


def aws(path: str, content: str) -> Answers:
    return {
        TOKEN: "a token",
        (f"GET /latest/meta-data/{path}", "x-aws-ec2-metadata-token", "a token"): content,
    }


def google(**values: str) -> Answers:
    path, header = "GET /computeMetadata/v1/instance", ("metadata-flavor", "Google")
    return {(f"{path}/{name.replace('_', '-')}", *header): value for name, value in values.items()}


def azure(kind: str, machine: str) -> Answers:
    version, header = "api-version=2020-07-01", ("metadata", "true")
    return {
        (f"GET /metadata/instance/compute/name?{version}&format=text", *header): "gpt_1",
        (f"GET /metadata/scheduledevents?{version}", *header): EVENTS % (kind, machine),
    }


@pytest.mark.parametrize(
    ("answers", "is_taken"),
    [
        (aws("spot/instance-action", '{"action": "stop", "time": "2026-01-01T08:22:00Z"}'), True),
        (aws("events/recommendations/rebalance", '{"noticeTime": "2026-01-01T08:20:00Z"}'), False),
        (google(preempted="TRUE", maintenance_event="NONE"), True),
        (google(preempted="FALSE", maintenance_event="TERMINATE_ON_HOST_MAINTENANCE"), True),
        (google(preempted="FALSE", maintenance_event="MIGRATE_ON_HOST_MAINTENANCE"), False),
        (azure("Preempt", "GPT_1"), True),
        (azure("Terminate", "gpt_1"), True),
        (azure("Preempt", "gpt_10"), False),  # for another machine of the scale set
    ],
)
def test_the_agent_gets_sigterm_only_when_its_machine_will_be_taken(answers: Answers, is_taken: bool) -> None:
    requests = []

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request = f"{self.command} {self.path}"
            requests.append(request)
            keys = [key for key in answers if key[0] == request and self.headers[key[1]] == key[2]]
            self.send_response(HTTPStatus.OK if keys else HTTPStatus.NOT_FOUND)
            self.end_headers()
            self.wfile.write(answers[keys[0]].encode() if keys else b"")

        do_PUT = do_GET

    agent = subprocess.Popen(["sleep", "60"])
    with serving(Metadata) as url:
        notice = subprocess.Popen(
            [ROOT / "launch/notice.sh", str(agent.pid)],
            env=os.environ | {"METADATA_URL": url, "NOTICE_EVERY_S": "0.1", "http_proxy": "none"},
        )
        if not is_taken:
            wait_until(lambda: requests.count(TOKEN[0]) > 2)
            agent.kill()
        assert (-agent.wait(20), notice.wait(20)) == ((SIGTERM, 0) if is_taken else (SIGKILL, 1))
