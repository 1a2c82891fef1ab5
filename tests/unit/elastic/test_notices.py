"""What the metadata services say, by real requests to services on loopback."""

import os
from pathlib import Path

import pytest

from elastic.notices import Aws, Gcp, Notices, leave_mark, read_mark
from tests.support.metadata import (
    AWS_PATH,
    AWS_REBALANCE,
    GCP_MAINTENANCE,
    GCP_PREEMPTED,
    INTERRUPTION,
    aws,
    gcp,
)


def test_an_aws_interruption_is_a_notice_and_nothing_else_is() -> None:
    with aws() as fake:
        service = Aws({"AWS_EC2_METADATA_SERVICE_ENDPOINT": fake.url})
        assert service.interruption() is None
        assert service.rebalance() is None
        fake.answers[AWS_PATH] = INTERRUPTION
        assert service.interruption() == "AWS: spot instance: terminate at 2027-01-01T08:22:00Z"
        fake.answers[AWS_REBALANCE] = '{"noticeTime": "2027-01-01T08:00:00Z"}'
        assert "2027-01-01T08:00:00Z" in str(service.rebalance())


def test_an_aws_token_that_is_over_is_asked_for_anew() -> None:
    with aws(INTERRUPTION) as fake:
        service = Aws({"AWS_EC2_METADATA_SERVICE_ENDPOINT": fake.url})
        assert service.interruption() is not None
        fake.token = "another"  # noqa: S105 - of a fake
        with pytest.raises(ValueError, match="status 401"):
            service.interruption()
        assert service.interruption() is not None


@pytest.mark.parametrize(
    ("path", "said", "expected"),
    [
        (GCP_PREEMPTED, "TRUE", "Google Cloud: this instance is preempted"),
        (GCP_MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE", "Google Cloud: maintenance: TERMINATE_ON_HOST_MAINTENANCE"),
        (GCP_MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE", None),
        (GCP_MAINTENANCE, "NONE", None),
    ],
)  # fmt: skip
def test_what_google_cloud_says(path: str, said: str, expected: str | None) -> None:
    with gcp() as fake:
        fake.answers[path] = said
        service = Gcp({"GCE_METADATA_HOST": fake.url.removeprefix("http://")})
        assert service.look() == expected


def test_a_service_that_does_not_answer_is_told_once_and_hinders_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with aws() as gone:
        silent = gone.url
    with gcp(preempted="TRUE") as fake:
        environ = {"GCE_METADATA_HOST": fake.url, "AWS_EC2_METADATA_SERVICE_ENDPOINT": silent}
        notices = Notices(["aws", "gcp", "slurm"], tmp_path, environ)
        assert [notices.look(), notices.look()] == ["Google Cloud: this instance is preempted"] * 2
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "notices: aws: no answer"
    ]


def test_the_first_reason_stays_on_the_node(tmp_path: Path) -> None:
    assert read_mark(tmp_path) is None
    leave_mark(tmp_path, "first")
    leave_mark(tmp_path, "second")
    assert read_mark(tmp_path) == "first"
    assert os.listdir(tmp_path) == ["notice"]  # noqa: PTH208 - names alone
