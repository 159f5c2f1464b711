#!/usr/bin/env python3
"""Writes the dashboard JSON files that Grafana imports: python3 build.py [FOLDER].

tests/suite/dashboards.rs runs every query."""

import json
import pathlib
import sys

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF = 'job="$job", instance=~"$instance"'
INFO = f"gpumem_process_info{{{OF}}}"
DASHBOARDS = {
    "node": "Devices and the processes that use their memory",
    "process": "Memory of one process",
    "fleet": "Nodes, users and jobs",
    "health": "Health of gpumemd",
}


def named(value, *labels):
    """Adds labels of gpumem_process_info to a process metric."""
    return f"{value} * on (job, instance, pid, start) group_left ({', '.join(labels)}) {INFO}"


def query(expr, legend="", table=False):
    """One query of a panel."""
    target = {"datasource": SOURCE, "expr": expr, "legendFormat": legend, "editorMode": "code"}
    return target | ({"instant": True, "format": "table"} if table else {"range": True})


def limited(panel, limits):
    """Colours values of a panel from each limit on: pairs of value and colour."""
    if limits:
        steps = [{"color": color, "value": value} for value, color in ((None, "green"), *limits)]
        panel["fieldConfig"]["defaults"] |= {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
        if panel["type"] == "timeseries":
            del panel["fieldConfig"]["defaults"]["color"]
    return panel


#: Any occurrence is a problem.
ANY = ((1, "red"),)
#: Shares of a full device.
FULL = ((0.9, "orange"), (0.97, "red"))


class Dashboard:
    """Places panels from left to right and top to bottom in a grid 24 columns wide."""

    def __init__(self, name, variables):
        self.name, self.panels, self.variables = name, [], variables
        self.x = self.y = self.row = 0

    def add(self, kind, title, description, targets, unit, width, height=8, options=None, **custom):
        if self.x + width > 24:
            self.x, self.y, self.row = 0, self.y + self.row, 0
        for place, target in enumerate(targets):
            target["refId"] = "ABCDEFGH"[place]
        defaults = {"unit": unit, "custom": custom}
        if not custom:
            del defaults["custom"]
        panel = {
            "id": len(self.panels) + 1,
            "type": kind,
            "title": title,
            "description": description,
            "datasource": SOURCE,
            "gridPos": {"x": self.x, "y": self.y, "w": width, "h": height},
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": options or {},
        }
        self.panels.append(panel)
        self.x, self.row = self.x + width, max(self.row, height)
        return panel

    def stat(self, title, description, expr, unit, width=4, limits=()):
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area", "colorMode": "value"}
        return limited(self.add("stat", title, description, [query(expr)], unit, width, 4, options), limits)

    def lines(self, title, description, targets, unit, width=12, stacked=False, limits=()):
        legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
        options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        custom = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}} if stacked else {"fillOpacity": 0}
        panel = self.add("timeseries", title, description, targets, unit, width, 8, options, **custom)
        # Unknown values are gaps in the line; byte axes start at 0.
        panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] = False
        if unit == "bytes" and not stacked:
            panel["fieldConfig"]["defaults"]["custom"]["axisSoftMin"] = 0
        if limits:
            panel["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"] = {"mode": "dashed"}
        return limited(panel, limits)

    def table(self, title, description, targets, unit, names, width=24):
        """`names`: column names of the values, in the order of the targets."""
        panel = self.add("table", title, description, targets, unit, width, 8, {"showHeader": True, "cellHeight": "sm"})
        one = len(targets) == 1
        renamed = {("Value" if one else f"Value #{target['refId']}"): name for target, name in zip(targets, names)}
        hidden = {"Time": True, "job": True, "__name__": True}
        organize = {"excludeByName": hidden, "renameByName": renamed, "indexByName": {}}
        panel["transformations"] = [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}]
        return panel

    def json(self):
        link = {
            "asDropdown": False,
            "icon": "external link",
            "includeVars": True,
            "keepTime": True,
            "tags": ["gpumem"],
            "targetBlank": False,
            "title": "gpumem",
            "tooltip": "Other gpumem dashboards",
            "type": "dashboards",
            "url": "",
        }
        return {
            "uid": f"gpumem-{self.name}",
            "title": f"gpumem / {self.name}",
            "description": DASHBOARDS[self.name],
            "tags": ["gpumem"],
            "schemaVersion": 39,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "timezone": "browser",
            "links": [link],
            "templating": {"list": self.variables},
            "annotations": {"list": []},
            "panels": self.panels,
        }


def variable(name, label, definition, many=False):
    """A variable with the values of a label."""
    found = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": definition, "refId": "A"},
        "refresh": 2,
        "sort": 3,
        "multi": many,
        "includeAll": many,
    }
    return found | ({"allValue": ".+", "current": {"text": ["All"], "value": ["$__all"]}} if many else {})


def variables(many=False):
    """Variables of every dashboard: data source, scrape job, nodes."""
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1},
        variable("job", "Scrape job", "label_values(gpumemd_build_info, job)"),
        variable("instance", "Node", 'label_values(gpumemd_build_info{job="$job"}, instance)', many),
    ]


def link_to_process(panel):
    """Links each pid to its process dashboard."""
    url = (
        "/d/gpumem-process?var-datasource=${datasource}&var-job=${job}"
        "&var-instance=${__data.fields.instance}&var-pid=${__data.fields.pid}&${__url_time_range}"
    )
    links = [{"title": "This process", "url": url, "targetBlank": False}]
    override = {"matcher": {"id": "byName", "options": "pid"}, "properties": [{"id": "links", "value": links}]}
    panel["fieldConfig"]["overrides"].append(override)


def processes(board, limit=None):
    """The table of processes."""

    def of(name):
        labels = "instance, gpu, pid, user, comm, job_name"
        value = f"sum by ({labels}) ({named(f'gpumem_process_{name}{{{OF}}}', 'user', 'comm', 'job_name')})"
        return query(f"topk({limit}, {value})" if limit else value, table=True)

    panel = board.table(
        "Processes",
        "Each row is the memory of a process on a device. Without an agent only used is known. The row (other) is the sum of the processes without a series.",
        [of("used_bytes"), of("tracked_bytes"), of("untrackable_bytes"), of("used_peak_bytes")],
        "bytes",
        ["used", "tracked", "untrackable", "highest used"],
    )
    link_to_process(panel)


def findings(board):
    """The table of findings about processes."""
    labels = "instance, gpu, pid, user, comm, severity, kind"
    panel = board.table(
        "Findings",
        "Each row is a conclusion about a process with an agent, with the bytes that it explains. The kind growth is memory that is not released, and unused_pool is memory that the allocator caches. The table is empty if nothing is wrong. gpumemctl report PID explains each row.",
        [query(f"sum by ({labels}) ({named(f'gpumem_process_finding{{{OF}}}', 'user', 'comm')})", table=True)],
        "bytes",
        ["bytes"],
    )
    link_to_process(panel)


def node():
    board = Dashboard("node", variables())
    board.stat("GPUs", "Number of devices that NVML reports on the selected node.", f"count(gpumem_device_info{{{OF}}})", "none")
    board.stat("Used", "Memory in use, summed over all devices of the node.", f"sum(gpumem_device_used_bytes{{{OF}}})", "bytes")
    board.stat(
        "Fullest device",
        "Share of the memory in use on the fullest device. Above 97 % the next request may fail.",
        f"max(uuid:gpumem_device_full:ratio{{{OF}}})",
        "percentunit",
        limits=FULL,
    )
    board.stat("Processes", "Processes with memory on any device. A process on two devices counts twice.", f"sum(gpumem_device_processes{{{OF}}})", "none")
    board.stat(
        "Covered",
        "Share of process memory that belongs to processes with an agent. The rest has no tags.",
        f"instance:gpumem_process_covered:ratio{{{OF}}}",
        "percentunit",
        limits=((0, "red"), (0.5, "orange"), (0.9, "green")),
    )
    board.stat(
        "Out of memory",
        "Number of requests that failed in the selected time range. gpumemctl oom shows the cause of each.",
        f"sum(increase(gpumem_device_ooms_total{{{OF}}}[$__range]))",
        "none",
        limits=ANY,
    )
    findings(board)
    board.lines(
        "Used by device",
        "Each line is the highest use of a device in each minute, including samples between scrapes.",
        [query(f"gpumem_device_used_highest_bytes{{{OF}}}", "GPU {{gpu}}")],
        "bytes",
    )
    board.lines(
        "Composition of the devices",
        "The areas are the memory of processes, memory that no process is charged for (unaccounted), the driver's share, and free memory. They add up to the size of all devices.",
        [
            query(f"sum(gpumem_device_used_bytes{{{OF}}}) - sum(gpumem_device_unaccounted_bytes{{{OF}}})", "processes"),
            query(f"sum(gpumem_device_unaccounted_bytes{{{OF}}})", "unaccounted"),
            query(f"sum(gpumem_device_system_reserved_bytes{{{OF}}})", "driver"),
            query(f"sum(gpumem_device_free_bytes{{{OF}}})", "free"),
        ],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Used by process",
        "Each area is the memory that NVML, and so nvidia-smi, charges to a process.",
        [query(named(f"gpumem_process_used_bytes{{{OF}}}", "user", "comm"), "GPU {{gpu}}: {{comm}} {{pid}} {{user}}")],
        "bytes",
        24,
        stacked=True,
    )
    processes(board)
    board.lines(
        "Growth of processes",
        "A line is the memory that a process added in the last 45 minutes, if it grew in each of three 15-minute intervals. The panel is empty if nothing grows. Processes without an agent are included.",
        [query(named(f"pid:gpumem_process_used_bytes:growth45m{{{OF}}}", "user", "comm"), "GPU {{gpu}}: {{comm}} {{pid}} {{user}}")],
        "bytes",
        24,
    )
    board.lines(
        "Tracked by category",
        "Each area is a category of the memory of all processes with an agent. The setting rules below [metrics] defines the categories.",
        [query(f"sum by (category) (gpumem_process_category_bytes{{{OF}}})", "{{category}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Untrackable by cause",
        "Each area is a cause of memory that the driver charges beyond the recorded allocations of processes with an agent.",
        [query(f"sum by (part) (gpumem_process_untrackable_part_bytes{{{OF}}})", "{{part}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Out of memory by device",
        "Each line counts the requests that failed on a device. gpumemctl oom shows the cause of each.",
        [query(f"increase(gpumem_device_ooms_total{{{OF}}}[$__rate_interval])", "GPU {{gpu}} {{kind}}")],
        "none",
    )
    board.lines(
        "Age of the last sample",
        "Each line is the age of the last NVML sample of a device. NVML does not respond if it is above 2 seconds.",
        [query(f"gpumem_device_sample_age_seconds{{{OF}}}", "GPU {{gpu}}")],
        "s",
        limits=((2, "red"),),
    )
    return board


def process():
    of = f'{OF}, pid="$pid"'
    pid = variable("pid", "Process", f"label_values({INFO}, pid)")
    board = Dashboard("process", variables() + [pid])
    board.table(
        "Owner",
        "The table shows user, command, job and rank. The column claimed lists the values that only the process itself reported.",
        [query(f"gpumem_process_info{{{of}}}", table=True)],
        "none",
        ["alive"],
        16,
    )
    board.table(
        "Data quality",
        "A covered process has an agent, and of an uncovered one only NVML's figure is known. A late agent started after the first allocations. If the flag is partial, some history was lost. A blocked or paused agent receives no driver calls, and a stale one has stopped sending.",
        [query(f"sum by (gpu, flag) (gpumem_process_flag{{{of}}})", table=True)],
        "none",
        ["set"],
        8,
    )
    board.lines(
        "Findings",
        "Each line is the bytes that a finding about the process explains, and begins when the finding is first made. gpumemctl report PID names the modules.",
        [query(f"sum by (gpu, kind, severity) (gpumem_process_finding{{{of}}})", "GPU {{gpu}}: {{kind}} ({{severity}})")],
        "bytes",
        24,
    )
    board.lines(
        "Used",
        "The areas add up to the memory that NVML charges: memory older than the agent, tracked memory, and Untrackable.",
        [
            query(f"sum by (gpu) (gpumem_process_tracked_bytes{{{of}}})", "GPU {{gpu}}: tracked"),
            query(f"sum by (gpu) (gpumem_process_predates_bytes{{{of}}})", "GPU {{gpu}}: predates the agent"),
            query(f"sum by (gpu) (gpumem_process_untrackable_bytes{{{of}}})", "GPU {{gpu}}: untrackable"),
        ],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Growth",
        "The line is the memory that the process added in the last 45 minutes, if it grew in each of three 15-minute intervals. The panel is empty if it does not grow.",
        [query(f"pid:gpumem_process_used_bytes:growth45m{{{of}}}", "GPU {{gpu}}: added in 45 minutes")],
        "bytes",
    )
    board.lines(
        "Used: peak and floor",
        "The lines are the memory of the process, its highest value so far, and its minimum of the last 15 minutes (floor). A rising floor means a leak.",
        [
            query(f"gpumem_process_used_bytes{{{of}}}", "GPU {{gpu}}: used"),
            query(f"gpumem_process_used_peak_bytes{{{of}}}", "GPU {{gpu}}: highest"),
            query(f"pid:gpumem_process_used_bytes:min15m{{{of}}}", "GPU {{gpu}}: floor"),
        ],
        "bytes",
    )
    board.lines(
        "Tracked by category",
        "Each area is a category of the driver's allocations and of the blocks that pools carve from them.",
        [query(f"sum by (gpu, category) (gpumem_process_category_bytes{{{of}}})", "GPU {{gpu}}: {{category}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Tracked by tag",
        "The areas are the largest tags and the rest. The panel needs tags above 0 below [metrics] in gpumemd.toml.",
        [query(f"sum by (gpu, tag) (gpumem_process_tag_bytes{{{of}}})", "GPU {{gpu}}: {{tag}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Untrackable by cause",
        "The context is measured, and modules are an upper bound. Local memory, heaps and rounding are estimated by models. Unexplained is the remainder.",
        [query(f"sum by (gpu, part) (gpumem_process_untrackable_part_bytes{{{of}}})", "GPU {{gpu}}: {{part}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Events of the agent",
        "The lines are allocations, frees and names in each second, lost events, and failed allocations.",
        [
            query(f"rate(gpumem_process_events_total{{{of}}}[$__rate_interval])", "applied"),
            query(f"rate(gpumem_process_events_lost_total{{{of}}}[$__rate_interval])", "lost"),
            query(f"rate(gpumem_process_allocation_failures_total{{{of}}}[$__rate_interval])", "failed allocations"),
        ],
        "ops",
    )
    return board


def fleet():
    job_name = variable("job_name", "Job", f'label_values(gpumem_process_info{{{OF}, job_name!=""}}, job_name)', True)
    board = Dashboard("fleet", variables(True) + [job_name])
    board.stat("Nodes", "Number of selected nodes that respond.", f"sum(up{{{OF}}})", "none")
    board.stat("GPUs", "Number of GPUs of the selected nodes.", f"count(gpumem_device_info{{{OF}}})", "none")
    board.stat("Used", "Memory in use, summed over all devices of the selected nodes.", f"sum(instance:gpumem_device_used_bytes:sum{{{OF}}})", "bytes")
    board.stat("Size", "Memory of all devices of the selected nodes.", f"sum(instance:gpumem_device_total_bytes:sum{{{OF}}})", "bytes")
    board.stat(
        "Covered",
        "Share of process memory that belongs to processes with an agent. The rest has no tags.",
        f'sum(gpumem_process_used_bytes{{{OF}}} and on (job, instance, gpu, uuid, pid, start) gpumem_process_flag{{{OF}, flag="covered"}}) / sum(gpumem_process_used_bytes{{{OF}}})',
        "percentunit",
        limits=((0, "red"), (0.5, "orange"), (0.9, "green")),
    )
    board.stat(
        "Out of memory",
        "Number of requests that failed in the selected time range. gpumemctl oom shows the cause of each.",
        f"sum(increase(gpumem_device_ooms_total{{{OF}}}[$__range]))",
        "none",
        limits=ANY,
    )
    board.lines(
        "Used by node",
        "Each line is the used share of the memory of a node's devices.",
        [
            query(
                f"instance:gpumem_device_used_bytes:sum{{{OF}}} / instance:gpumem_device_total_bytes:sum{{{OF}}}",
                "{{instance}}",
            )
        ],
        "percentunit",
        limits=FULL,
    )
    board.lines(
        "Used by user",
        "Each area is the memory of a user's processes on all nodes of this scrape job.",
        [query('user:gpumem_process_used_bytes:sum{job="$job"}', "{{user}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Used by job",
        "Each area is the memory of a job on all nodes of this scrape job. Job names come from gpumemctl run --name, Slurm or Kubernetes.",
        [query('job_name:gpumem_process_used_bytes:sum{job="$job", job_name=~"$job_name"}', "{{job_name}}")],
        "bytes",
        stacked=True,
    )
    ranks = f'gpumem_process_used_bytes{{{OF}}} * on (job, instance, pid, start) group_left (job_name, rank) gpumem_process_info{{{OF}, job_name=~"$job_name"}}'
    findings(board)
    board.lines(
        "Largest rank of each job, relative to the mean",
        "A job of which all ranks use the same memory has 1. gpumemctl job ID --prometheus URL shows which rank, and why.",
        [query(f"max by (job_name) ({ranks}) / avg by (job_name) ({ranks})", "{{job_name}}")],
        "none",
    )
    board.table(
        "Fullest devices",
        "Each row is the used share of one of the ten fullest devices.",
        [query(f"topk(10, uuid:gpumem_device_full:ratio{{{OF}}})", table=True)],
        "percentunit",
        ["full"],
        12,
    )
    board.lines(
        "Memory without an agent, by node",
        "Each line is the memory of a node's processes without an agent.",
        [
            query(
                f'sum by (instance) (gpumem_process_used_bytes{{{OF}}} and on (job, instance, gpu, uuid, pid, start) gpumem_process_flag{{{OF}, flag="uncovered"}})',
                "{{instance}}",
            )
        ],
        "bytes",
    )
    processes(board, 20)
    board.lines(
        "Growth of processes",
        "A line is the memory that one of the ten fastest growing processes added in the last 45 minutes, if it grew in each of three 15-minute intervals. The panel is empty if nothing grows.",
        [
            query(
                f"topk(10, {named(f'pid:gpumem_process_used_bytes:growth45m{{{OF}}}', 'user', 'comm', 'job_name')})",
                "{{instance}} GPU {{gpu}}: {{comm}} {{pid}} {{user}} {{job_name}}",
            )
        ],
        "bytes",
        24,
    )
    board.lines(
        "Out of memory, by node",
        "Each line counts the requests that failed on a node.",
        [query(f"sum by (instance) (increase(gpumem_device_ooms_total{{{OF}}}[$__rate_interval]))", "{{instance}}")],
        "none",
        24,
    )
    return board


def health():
    board = Dashboard("health", variables(True))

    def rate(name):
        return f"rate({name}{{{OF}}}[$__rate_interval])"

    def rates(title, description, unit, *series, width=8):
        targets = [query(rate(name), ("{{instance}} " + legend).strip()) for name, legend in series]
        board.lines(title, description, targets, unit, width)

    board.table(
        "Versions",
        "Each row is the version of gpumemd on a node.",
        [query(f"gpumemd_build_info{{{OF}}}", table=True)],
        "none",
        ["runs"],
        8,
    )
    board.lines("Sources", "A source that is up has 1, and one that is down has 0.", [query(f"gpumemd_source_up{{{OF}}}", "{{instance}} {{source}}")], "none", 8)
    board.lines(
        "Age of the data",
        "Each line is the age of the data in a scrape of a node. It is normally at most one second.",
        [query(f"gpumemd_snapshot_age_seconds{{{OF}}}", "{{instance}}")],
        "s",
        8,
        limits=((5, "red"),),
    )
    rates("CPU", "Each line is the share of one core that the daemon takes.", "percentunit", ("process_cpu_seconds_total", ""))
    board.lines("Resident memory", "Each line is the resident memory of the daemon on a node.", [query(f"process_resident_memory_bytes{{{OF}}}", "{{instance}}")], "bytes", 8)
    board.lines("File descriptors", "Each line is the number of open descriptors of the daemon on a node.", [query(f"process_open_fds{{{OF}}}", "{{instance}}")], "none", 8)
    board.lines(
        "Agents",
        "The lines are the connected agents of a node, and the peers that have not sent their hello.",
        [query(f"gpumemd_agents{{{OF}}}", "{{instance}}"), query(f"gpumemd_agents_waiting{{{OF}}}", "{{instance}} waiting")],
        "none",
        8,
    )
    rates("Records", "Each line is the number of records that the ledger applies in each second.", "ops", ("gpumemd_records_total", ""))
    rates("Bytes from agents", "Each line is the number of bytes that agents send in each second.", "Bps", ("gpumemd_agent_bytes_total", ""))
    rates(
        "Lost and dropped",
        "Every line should be 0, because each lost or dropped record makes numbers too low.",
        "ops",
        ("gpumemd_events_lost_total", "events lost"),
        ("gpumemd_agent_dropped_total", "agents: {{reason}}"),
        ("gpumemd_agent_records_skipped_total", "records: {{reason}}"),
        ("gpumemd_store_dropped_total", "runs"),
        ("gpumemd_recording_lost_total", "recording"),
    )
    rates("Refused", "The lines are the rejected peers and connections in each second.", "ops", ("gpumemd_agent_refused_total", "agents: {{reason}}"), ("gpumemd_http_refused_total", "http: {{reason}}"))
    board.lines(
        "Time in process lists",
        "Each line is the share of time in which process lists block the driver. The budget is nvml.list_budget, by default 2 %.",
        [query(f"gpumemd_nvml_list_share_ratio{{{OF}}}", "{{instance}}")],
        "percentunit",
        8,
        limits=((0.02, "orange"),),
    )
    rates("NVML calls", "The lines are the calls of NVML in each second.", "ops", ("gpumemd_nvml_memory_calls_total", "memory"), ("gpumemd_nvml_list_calls_total", "lists"), ("gpumemd_nvml_failed_calls_total", "failed"), ("gpumemd_nvml_lists_deferred_total", "lists deferred"))
    rates("Pollers", "The lines are the starts of the child that reads NVML, and its calls that hung, in each second.", "ops", ("gpumemd_nvml_restarts_total", "started"), ("gpumemd_nvml_hangs_total", "hung"))
    board.lines("Run store", "Each line is the size of a node's store file.", [query(f"gpumemd_store_bytes{{{OF}}}", "{{instance}}")], "bytes", 8)
    board.lines("Waiting for the store", "Each line is the number of runs that are not written yet.", [query(f"gpumemd_store_waiting{{{OF}}}", "{{instance}}")], "none", 8)
    rates("Store", "The lines are the writes and errors of the store in each second.", "ops", ("gpumemd_store_writes_total", "writes"), ("gpumemd_store_errors_total", "errors"))
    board.lines(
        "Series of a scrape",
        "Each line is the number of samples in a scrape, as Prometheus counts them.",
        [query(f"scrape_samples_scraped{{{OF}}}", "{{instance}}")],
        "none",
        8,
    )
    board.lines(
        "Processes summed as (other)",
        "Processes are summed because they are young, or because max_series was reached.",
        [query(f"gpumemd_processes_folded{{{OF}}}", "{{instance}} {{reason}}")],
        "none",
        12,
    )
    board.lines(
        "Scrape duration",
        "Each line is the duration of a scrape, as Prometheus measures it.",
        [query(f"scrape_duration_seconds{{{OF}}}", "{{instance}}")],
        "s",
        12,
    )
    return board


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
    for board in (node(), process(), fleet(), health()):
        text = json.dumps(board.json(), indent=1, ensure_ascii=False)
        (folder / f"{board.name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
