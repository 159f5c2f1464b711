"""Checks the output of kubectl kustomize for config/kubernetes: Kubernetes' schemas, and each security property.

    manifests.py FOLDER    with base.yaml, monitoring.yaml, example.yaml, policy.yaml (rendered), gpumem.json and crds/ (if there)
"""

import json
import pathlib
import sys
import tomllib

import celpy
import jsonschema
import kubernetes_validate
import yaml

FOLDER = pathlib.Path(sys.argv[1])
#: The oldest and the newest that are promised; the policy's API is younger.
VERSIONS = {"base": ["1.28", "1.37"], "example": ["1.28", "1.37"], "policy": ["1.36", "1.37"]}
#: Of the base: nothing else of the node is mounted.
NODE = {"/run/gpumemd", "/var/lib/gpumemd", "/var/lib/gpumem", "/var/log/containers"}
NAME = {"app.kubernetes.io/name": "gpumemd"}


def load(name):
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def of_kind(documents, kind):
    found = [document for document in documents if document["kind"] == kind]
    assert len(found) == 1, f"{len(found)} of {kind}"
    return found[0]


def schemas():
    for name, versions in VERSIONS.items():
        for document in load(name):
            for version in versions:
                kubernetes_validate.validate(document, version, strict=True)
            print(f"{name}: {document['kind']} {document['metadata']['name']}: {' and '.join(versions)}")
    # The validator rejects an invalid object.
    wrong = of_kind(load("base"), "DaemonSet")
    wrong["spec"]["template"]["spec"]["hostPids"] = True
    try:
        kubernetes_validate.validate(wrong, "1.37", strict=True)
    except kubernetes_validate.ValidationError:
        return
    raise AssertionError("hostPids was taken")


def crds():
    for path in sorted((FOLDER / "crds").glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        schema = strict(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        for document in load("monitoring"):
            if document["kind"] == crd["spec"]["names"]["kind"]:
                jsonschema.validate(document, schema)
                print(f"monitoring: {document['kind']} as its published definition has it")


def strict(schema):
    """What a schema does not name is refused, as kubectl apply --validate=strict does."""
    if isinstance(schema, dict):
        for part in list(schema.values()):
            strict(part)
        if isinstance(schema.get("pattern"), str):
            # Go's expressions may have their flags anywhere.
            schema["pattern"] = schema["pattern"].replace("^(?i)", "(?i)^")
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            if schema.get("type") == "object" and "spec" not in schema["properties"]:
                schema.setdefault("additionalProperties", False)
    elif isinstance(schema, list):
        for part in schema:
            strict(part)
    return schema


def privileges():
    base = load("base")
    daemonset = of_kind(base, "DaemonSet")["spec"]
    assert daemonset["selector"]["matchLabels"].items() <= daemonset["template"]["metadata"]["labels"].items()
    pod = daemonset["template"]["spec"]
    assert pod["hostPID"] is True, "peers and NVML's processes have no name otherwise"
    assert not pod.get("hostNetwork") and not pod.get("hostIPC")
    assert pod["automountServiceAccountToken"] is False
    account = of_kind(base, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False and pod["serviceAccountName"] == account["metadata"]["name"]
    assert not {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} & {document["kind"] for document in base}
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert pod["tolerations"] == [{"operator": "Exists"}]
    priority = of_kind(base, "PriorityClass")
    assert pod["priorityClassName"] == priority["metadata"]["name"] and priority["preemptionPolicy"] == "Never"
    added = {"directories": ["CHOWN"]}
    for container in pod["initContainers"] + pod["containers"]:
        name, context = container["name"], container["securityContext"]
        assert context["capabilities"]["drop"] == ["ALL"], name
        assert context["capabilities"].get("add", []) == added.get(name, []), name
        assert context["readOnlyRootFilesystem"] and context["allowPrivilegeEscalation"] is False, name
        assert "privileged" not in context, name
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
        assert "memory" in container["resources"]["limits"], name
        assert container["image"] == "registry.example.com/gpumemd:0.1.0", "one image, replaced in one place"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    node = {volume["hostPath"]["path"] for volume in volumes.values() if "hostPath" in volume}
    assert node == NODE, node

    (daemon,) = pod["containers"]
    assert "runAsUser" not in daemon["securityContext"], "the pod's, which is not root"
    environment = {entry["name"]: entry["value"] for entry in daemon["env"]}
    assert environment == {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"}
    mounts = {mount["name"]: mount for mount in daemon["volumeMounts"]}
    assert mounts.keys() == {"run", "state", "config", "names"}, "what training loads is not the daemon's to write"
    assert mounts["names"]["readOnly"] and mounts["names"]["mountPath"] == "/var/log/containers"
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert daemon[name]["httpGet"] == {"path": "/healthz", "port": "metrics"}, name
    (port,) = daemon["ports"]

    # The daemon's arguments match the mounted configuration.
    config = of_kind(base, "ConfigMap")
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    said = tomllib.loads(config["data"]["gpumemd.toml"])
    assert said["runtime_dir"] == mounts["run"]["mountPath"] == volumes["run"]["hostPath"]["path"]
    assert said["runs"]["store"].startswith(mounts["state"]["mountPath"] + "/")
    assert said["metrics"]["listen"] == f"0.0.0.0:{port['containerPort']}" == "0.0.0.0:9837"
    assert said["metrics"]["page"] == "off", "the address is the cluster's"
    assert daemon["command"][-1] == mounts["config"]["mountPath"] + "/gpumemd.toml" and mounts["config"]["readOnly"]
    (FOLDER / "gpumemd.toml").write_text(config["data"]["gpumemd.toml"])

    policy = of_kind(base, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == NAME
    assert policy["egress"] == [] and set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (ingress,) = policy["ingress"]
    assert ingress["ports"] == [{"port": "metrics", "protocol": "TCP"}] and ingress["from"], "not everybody"
    enforced = of_kind(base, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == "privileged"


def monitoring():
    documents = load("monitoring")
    monitor = of_kind(documents, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"] == NAME and monitor["jobLabel"] == next(iter(NAME))
    rule = of_kind(documents, "PrometheusRule")
    names = [group["name"] for group in rule["spec"]["groups"]]
    assert len(names) >= 2 and len(set(names)) == len(names)
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics" and endpoint["honorLabels"]
    dropped = [rule["regex"] for rule in endpoint["relabelings"] if rule.get("action") == "labeldrop"]
    assert dropped and {"pod", "namespace", "container"} <= set(dropped[0].split("|")), "of gpumemd's own pod"


def injected(pod, containers):
    """What an injected pod has: one library and the agents' directory, both to be read only."""
    node = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
    assert node == {"gpumem-library": "/var/lib/gpumem", "gpumem-agent": "/run/gpumemd/agent"}, node
    for container in containers:
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert all(mount["readOnly"] for mount in mounts.values())
        assert {path: mount["name"] for path, mount in mounts.items()} == {
            "/opt/gpumem": "gpumem-library",
            "/run/gpumemd": "gpumem-agent",
        }
        environment = {entry["name"]: entry for entry in container["env"]}
        for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
            assert environment[name]["value"] == "/opt/gpumem/libgpumem.so"
    assert not any("control" in path for path in node.values())


def example():
    pod = of_kind(load("example"), "Job")["spec"]["template"]["spec"]
    injected(pod, pod["containers"])
    assert not pod.get("hostPID") and not pod.get("hostNetwork"), "training needs nothing of the node's"


def cdi():
    spec = json.loads((FOLDER / "gpumem.json").read_text())
    (device,) = spec["devices"]
    edits = device["containerEdits"]
    assert spec.keys() == {"cdiVersion", "kind", "devices"} and spec["kind"] == "gpumem.dev/agent"
    mounts = {mount["containerPath"]: mount for mount in edits["mounts"]}
    assert {path: mount["hostPath"] for path, mount in mounts.items()} == {
        "/opt/gpumem": "/var/lib/gpumem",
        "/run/gpumemd": "/run/gpumemd/agent",
    }
    assert all("ro" in mount["options"] for mount in mounts.values())
    assert [entry.split("=")[1] for entry in edits["env"]] == ["/opt/gpumem/libgpumem.so"] * 2


def policy():
    spec = of_kind(load("policy"), "MutatingAdmissionPolicy")["spec"]
    assert spec["failurePolicy"] == "Ignore", "training starts whatever becomes of us"
    engine = celpy.Environment()

    def value(expression, pod):
        program = engine.program(engine.compile(expression))
        return program.evaluate({"object": celpy.json_to_cel(pod)})

    (train,) = spec["variables"]
    conditions = {condition["name"]: condition["expression"] for condition in spec["matchConditions"]}
    gpu = {"name": "train", "resources": {"limits": {"nvidia.com/gpu": "8", "cpu": "4"}}}
    mig = {"name": "mig", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    plain = [{"name": "side"}, {"name": "web", "resources": {}}, {"name": "cpu", "resources": {"limits": {"cpu": "1"}}}]

    def pod(containers, labels=None, volumes=None):
        metadata = {"name": "a"} if labels is None else {"name": "a", "labels": labels}
        spec = {"containers": containers} if volumes is None else {"containers": containers, "volumes": volumes}
        return {"metadata": metadata, "spec": spec}

    def matches(subject):
        return all(bool(value(expression, subject)) for expression in conditions.values())

    def names(subject):
        return [str(container["name"]) for container in value(train["expression"], subject)]

    assert matches(pod([gpu])) and matches(pod([*plain, mig], {"app": "x"}, [{"name": "data"}]))
    assert not matches(pod(plain))
    assert not matches(pod([gpu], {"gpumem.dev/inject": "false"})) and matches(pod([gpu], {"gpumem.dev/inject": "true"}))
    assert not matches(pod([gpu], None, [{"name": "gpumem-agent"}])), "twice"
    assert names(pod([*plain, gpu, mig])) == ["train", "mig"]
    for name in ("GPUMEM_DISABLE", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
        own = dict(gpu, env=[{"name": "A", "value": "1"}, {"name": name, "value": "1"}])
        assert names(pod([own, mig])) == ["mig"], name
    # Values of the API server's own types cannot be made here: the expression is parsed, and its words are the patch's.
    (mutation,) = spec["mutations"]
    text = mutation["applyConfiguration"]["expression"]
    engine.compile(text)
    words = ['"/var/lib/gpumem"', '"/run/gpumemd/agent"', '"DirectoryOrCreate"', '"/opt/gpumem"', '"/run/gpumemd"']
    for word in [*words, '"CUDA_INJECTION64_PATH", value: "/opt/gpumem/libgpumem.so"', "readOnly: true"]:
        assert word in text, word
    assert text.count("readOnly: true") == text.count("mountPath:") == 2


for check in (schemas, crds, privileges, monitoring, example, cdi, policy):
    check()
    print(f"{check.__name__}: right")
