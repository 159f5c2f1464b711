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
        steps = [{"color": "green", "value": None}] + [{"color": color, "value": value} for value, color in limits]
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
        "Memory of each process by device. Without an agent only used is available. (other) is the sum of the processes without a series.",
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
        "Conclusions about processes with an agent, with the bytes that they explain. growth: memory that is not released. unused_pool: memory that the allocator caches. Empty if nothing is wrong; gpumemctl report PID explains each.",
        [query(f"sum by ({labels}) ({named(f'gpumem_process_finding{{{OF}}}', 'user', 'comm')})", table=True)],
        "bytes",
        ["bytes"],
    )
    link_to_process(panel)


def node():
    board = Dashboard("node", variables())
    board.stat("GPUs", "Devices reported by NVML.", f"count(gpumem_device_info{{{OF}}})", "none")
    board.stat("Used", "Sum over all devices.", f"sum(gpumem_device_used_bytes{{{OF}}})", "bytes")
    board.stat("Free", "Sum over all devices.", f"sum(gpumem_device_free_bytes{{{OF}}})", "bytes")
    board.stat("Processes", "On all devices; a process on two devices counts twice.", f"sum(gpumem_device_processes{{{OF}}})", "none")
    board.stat(
        "Covered",
        "Share of process memory that belongs to processes with an agent. The rest has no tags.",
        f"instance:gpumem_process_covered:ratio{{{OF}}}",
        "percentunit",
    )
    board.stat(
        "Out of memory",
        "Number in the selected time range.",
        f"sum(increase(gpumem_device_ooms_total{{{OF}}}[$__range]))",
        "none",
    )
    findings(board)
    board.lines(
        "Used by device",
        "Maximum of each minute, including samples between scrapes.",
        [query(f"gpumem_device_used_highest_bytes{{{OF}}}", "GPU {{gpu}}")],
        "bytes",
    )
    board.lines(
        "Composition of the devices",
        "All devices: processes, unaccounted (charged to no process), reserved by the driver, free. The sum is the device size.",
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
        "Memory that NVML charges to each process.",
        [query(named(f"gpumem_process_used_bytes{{{OF}}}", "user", "comm"), "GPU {{gpu}}: {{comm}} {{pid}} {{user}}")],
        "bytes",
        24,
        stacked=True,
    )
    processes(board)
    board.lines(
        "Growth of processes",
        "Memory that each process added in the last 45 minutes, if it grew in each of three 15-minute intervals. Processes without an agent are included.",
        [query(named(f"pid:gpumem_process_used_bytes:growth45m{{{OF}}}", "user", "comm"), "GPU {{gpu}}: {{comm}} {{pid}} {{user}}")],
        "bytes",
        24,
    )
    board.lines(
        "Tracked by category",
        "All processes with an agent. [metrics] rules defines the categories.",
        [query(f"sum by (category) (gpumem_process_category_bytes{{{OF}}})", "{{category}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Untrackable by cause",
        "All processes with an agent: memory the driver charges beyond recorded allocations.",
        [query(f"sum by (part) (gpumem_process_untrackable_part_bytes{{{OF}}})", "{{part}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Out of memory by device",
        "Number of out-of-memory events; gpumemctl oom shows each.",
        [query(f"increase(gpumem_device_ooms_total{{{OF}}}[$__rate_interval])", "GPU {{gpu}} {{kind}}")],
        "none",
    )
    board.lines(
        "Age of the last sample",
        "Seconds since the last NVML sample of the device. Above 2, NVML is not responding.",
        [query(f"gpumem_device_sample_age_seconds{{{OF}}}", "GPU {{gpu}}")],
        "s",
    )
    return board


def process():
    of = f'{OF}, pid="$pid"'
    pid = variable("pid", "Process", f"label_values({INFO}, pid)")
    board = Dashboard("process", variables() + [pid])
    board.table(
        "Owner",
        "User, command, job and rank. The label claimed lists values that only the process itself reported.",
        [query(f"gpumem_process_info{{{of}}}", table=True)],
        "none",
        ["alive"],
        16,
    )
    board.table(
        "Data quality",
        "covered: it has an agent. uncovered: NVML only. late: the agent started after the first allocations. partial: some history was lost. blocked, paused: the agent receives no driver calls. stale: the agent has stopped sending.",
        [query(f"sum by (gpu, flag) (gpumem_process_flag{{{of}}})", table=True)],
        "none",
        ["set"],
        8,
    )
    board.lines(
        "Findings",
        "Bytes that each finding about the process explains. A line begins when the finding is first made. gpumemctl report PID names the modules.",
        [query(f"sum by (gpu, kind, severity) (gpumem_process_finding{{{of}}})", "GPU {{gpu}}: {{kind}} ({{severity}})")],
        "bytes",
        24,
    )
    board.lines(
        "Used",
        "used = predates + tracked + untrackable, for each sample.",
        [
            query(f"sum by (gpu) (gpumem_process_tracked_bytes{{{of}}})", "GPU {{gpu}}: tracked"),
            query(f"sum by (gpu) (gpumem_process_predates_bytes{{{of}}})", "GPU {{gpu}}: predates the agent"),
            query(f"sum by (gpu) (gpumem_process_untrackable_bytes{{{of}}})", "GPU {{gpu}}: untrackable"),
        ],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Used: peak and floor",
        "Highest sampled value, and the minimum of the last 15 minutes. A rising floor means a leak.",
        [
            query(f"gpumem_process_used_bytes{{{of}}}", "GPU {{gpu}}: used"),
            query(f"gpumem_process_used_peak_bytes{{{of}}}", "GPU {{gpu}}: highest"),
            query(f"pid:gpumem_process_used_bytes:min15m{{{of}}}", "GPU {{gpu}}: floor"),
        ],
        "bytes",
    )
    board.lines(
        "Tracked by category",
        "Driver allocations and the blocks that pools carve from them, by category.",
        [query(f"sum by (gpu, category) (gpumem_process_category_bytes{{{of}}})", "GPU {{gpu}}: {{category}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Tracked by tag",
        "The largest tags and the rest. Needs [metrics] tags above 0 in gpumemd.toml.",
        [query(f"sum by (gpu, tag) (gpumem_process_tag_bytes{{{of}}})", "GPU {{gpu}}: {{tag}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Untrackable by cause",
        "context is measured, modules is an upper bound, local memory, heaps and rounding are estimated by models, unexplained is the remainder.",
        [query(f"sum by (gpu, part) (gpumem_process_untrackable_part_bytes{{{of}}})", "GPU {{gpu}}: {{part}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Events of the agent",
        "Allocations, frees and names per second, and lost events.",
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
    board.stat("Nodes", "Nodes that respond.", f"sum(up{{{OF}}})", "none")
    board.stat("GPUs", "GPUs of the selected nodes.", f"count(gpumem_device_info{{{OF}}})", "none")
    board.stat("Used", "Sum over all devices.", f"sum(instance:gpumem_device_used_bytes:sum{{{OF}}})", "bytes")
    board.stat("Size", "Sum over all devices.", f"sum(instance:gpumem_device_total_bytes:sum{{{OF}}})", "bytes")
    board.stat(
        "Covered",
        "Share of process memory that belongs to processes with an agent.",
        f'sum(gpumem_process_used_bytes{{{OF}}} and on (job, instance, gpu, uuid, pid, start) gpumem_process_flag{{{OF}, flag="covered"}}) / sum(gpumem_process_used_bytes{{{OF}}})',
        "percentunit",
    )
    board.stat(
        "Out of memory",
        "Number in the selected time range.",
        f"sum(increase(gpumem_device_ooms_total{{{OF}}}[$__range]))",
        "none",
    )
    board.lines(
        "Used by node",
        "Share of the memory of the node's devices.",
        [
            query(
                f"instance:gpumem_device_used_bytes:sum{{{OF}}} / instance:gpumem_device_total_bytes:sum{{{OF}}}",
                "{{instance}}",
            )
        ],
        "percentunit",
    )
    board.lines(
        "Used by user",
        "Sum over all nodes of this scrape job.",
        [query('user:gpumem_process_used_bytes:sum{job="$job"}', "{{user}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Used by job",
        "Sum over all nodes of this scrape job. Job names come from gpumemctl run --name, Slurm or Kubernetes.",
        [query('job_name:gpumem_process_used_bytes:sum{job="$job", job_name=~"$job_name"}', "{{job_name}}")],
        "bytes",
        stacked=True,
    )
    ranks = f'gpumem_process_used_bytes{{{OF}}} * on (job, instance, pid, start) group_left (job_name, rank) gpumem_process_info{{{OF}, job_name=~"$job_name"}}'
    findings(board)
    board.lines(
        "Largest rank of each job, relative to the mean",
        "1 means balanced. gpumemctl job ID --prometheus URL shows which rank, and why.",
        [query(f"max by (job_name) ({ranks}) / avg by (job_name) ({ranks})", "{{job_name}}")],
        "none",
    )
    board.table(
        "Fullest devices",
        "Used share of the ten fullest devices.",
        [query(f"topk(10, uuid:gpumem_device_full:ratio{{{OF}}})", table=True)],
        "percentunit",
        ["full"],
        12,
    )
    board.lines(
        "Memory without an agent, by node",
        "Memory of processes without an agent.",
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
        "Out of memory, by node",
        "Number of out-of-memory events.",
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
        "gpumemd version of each node.",
        [query(f"gpumemd_build_info{{{OF}}}", table=True)],
        "none",
        ["runs"],
        8,
    )
    board.lines("Sources", "1 while a source is up.", [query(f"gpumemd_source_up{{{OF}}}", "{{instance}} {{source}}")], "none", 8)
    board.lines(
        "Age of the data",
        "Age of the data in a scrape; normally at most one second.",
        [query(f"gpumemd_snapshot_age_seconds{{{OF}}}", "{{instance}}")],
        "s",
        8,
    )
    rates("CPU", "Share of one core.", "percentunit", ("process_cpu_seconds_total", ""))
    board.lines("Resident memory", "Resident memory of the daemon.", [query(f"process_resident_memory_bytes{{{OF}}}", "{{instance}}")], "bytes", 8)
    board.lines("File descriptors", "Open descriptors of the daemon.", [query(f"process_open_fds{{{OF}}}", "{{instance}}")], "none", 8)
    board.lines(
        "Agents",
        "Connected agents, and peers that have not sent their hello.",
        [query(f"gpumemd_agents{{{OF}}}", "{{instance}}"), query(f"gpumemd_agents_waiting{{{OF}}}", "{{instance}} waiting")],
        "none",
        8,
    )
    rates("Records", "Records applied to the ledger per second.", "ops", ("gpumemd_records_total", ""))
    rates("Bytes from agents", "Bytes received from agents per second.", "Bps", ("gpumemd_agent_bytes_total", ""))
    rates(
        "Lost and dropped",
        "Should be 0.",
        "ops",
        ("gpumemd_events_lost_total", "events lost"),
        ("gpumemd_agent_dropped_total", "agents: {{reason}}"),
        ("gpumemd_agent_records_skipped_total", "records: {{reason}}"),
        ("gpumemd_store_dropped_total", "runs"),
        ("gpumemd_recording_lost_total", "recording"),
    )
    rates("Refused", "Rejected peers and connections.", "ops", ("gpumemd_agent_refused_total", "agents: {{reason}}"), ("gpumemd_http_refused_total", "http: {{reason}}"))
    board.lines(
        "Time in process lists",
        "Share of time in which process lists block the driver; the budget is nvml.list_budget (2 %).",
        [query(f"gpumemd_nvml_list_share_ratio{{{OF}}}", "{{instance}}")],
        "percentunit",
        8,
    )
    rates("NVML calls", "Calls per second.", "ops", ("gpumemd_nvml_memory_calls_total", "memory"), ("gpumemd_nvml_list_calls_total", "lists"), ("gpumemd_nvml_failed_calls_total", "failed"), ("gpumemd_nvml_lists_deferred_total", "lists deferred"))
    rates("Pollers", "Restarts, and hung calls.", "ops", ("gpumemd_nvml_restarts_total", "started"), ("gpumemd_nvml_hangs_total", "hung"))
    board.lines("Run store", "Size of the store file.", [query(f"gpumemd_store_bytes{{{OF}}}", "{{instance}}")], "bytes", 8)
    board.lines("Waiting for the store", "Runs not yet written.", [query(f"gpumemd_store_waiting{{{OF}}}", "{{instance}}")], "none", 8)
    rates("Store", "Writes and errors per second.", "ops", ("gpumemd_store_writes_total", "writes"), ("gpumemd_store_errors_total", "errors"))
    board.lines(
        "Series of a scrape",
        "Number of samples, counted by Prometheus.",
        [query(f"scrape_samples_scraped{{{OF}}}", "{{instance}}")],
        "none",
        8,
    )
    board.lines(
        "Processes summed as (other)",
        "Because they are young, or because max_series was reached.",
        [query(f"gpumemd_processes_folded{{{OF}}}", "{{instance}} {{reason}}")],
        "none",
        12,
    )
    board.lines(
        "Scrape duration",
        "Measured by Prometheus.",
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
