"""`spec.adapters`: a Job loads them, and the status has what became of each."""

import json

from support.kubernetes.control_plane import Object, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld

RESULTS = {"sql": {"revision": "r1"}, "poet": {"error": "/adapters/poet: no such file"}}


def job_of(world: PoolWorld, known: set[str]) -> Object:
    """The next Job of adapters."""

    def found() -> Object | None:
        jobs = world.kube.get(world.path("jobs"))["items"]
        made = [each for each in jobs if "-adapters-" in each["metadata"]["name"]]
        return next((each for each in made if each["metadata"]["name"] not in known), None)

    job: Object = eventually(found, "a Job")
    known.add(job["metadata"]["name"])
    return job


def arguments(job: Object) -> list[str]:
    args: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return [each for each in args if each.startswith("--") and "=" in each]


def test_adapters_are_loaded_reported_and_unloaded(operator: OperatorProcess, world: PoolWorld) -> None:
    listed = [{"name": "sql", "path": "/adapters/sql"}, {"name": "poet", "path": "/adapters/poet"}]
    world.create("tuned", engine={"enableLora": True}, adapters=listed)
    known: set[str] = set()
    job = job_of(world, known)
    assert arguments(job) == ["--load=sql=/adapters/sql", "--load=poet=/adapters/poet"]
    world.end_job(job["metadata"]["name"], "Succeeded", message=json.dumps(RESULTS))
    condition = world.wait_condition("Degraded", "AdapterRefused", "tuned")
    assert condition["message"] == "poet: /adapters/poet: no such file"
    assert world.pool("tuned")["status"]["adapters"] == [
        {"name": "sql", "path": "/adapters/sql", "revision": "r1", "message": ""},
        {"name": "poet", "path": "/adapters/poet", "revision": "", "message": "/adapters/poet: no such file"},
    ]
    world.change({"adapters": []}, "tuned")
    job = job_of(world, known)
    assert arguments(job) == ["--unload=sql=r1"]
    world.end_job(job["metadata"]["name"], "Failed", exit_code=2)
    eventually(lambda: "exit code 2" in world.pool("tuned")["status"]["adapters"][0]["message"], "the failure")
    assert [each["revision"] for each in world.pool("tuned")["status"]["adapters"]] == ["r1"], "it is loaded still"
    job = job_of(world, known)
    assert arguments(job) == ["--unload=sql=r1"], "another try"
    world.end_job(job["metadata"]["name"], "Succeeded", message="{}")
    world.wait_condition("Degraded", "AsExpected", "tuned")
    world.change({"adapters": listed[:1]}, "tuned")
    world.end_job(job_of(world, known)["metadata"]["name"], "Failed", exit_code=2)
    assert "exit code 2" in world.wait_condition("Degraded", "AdapterRefused", "tuned")["message"]
