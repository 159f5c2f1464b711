#!/usr/bin/env python3
"""Writes the dashboards beside it: python3 build.py [FOLDER]. What all panels share stands here once; the JSON is what
Grafana imports. tests/suite/dashboards.rs runs every query."""

import json
import pathlib
import sys

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF = 'job="$job", instance=~"$instance"'
INFO = f"gpumem_process_info{{{OF}}}"
DASHBOARDS = {
    "node": "Devices, and who holds their memory",
    "process": "Where the memory of one process went",
    "fleet": "Nodes, users and jobs",
    "health": "gpumemd itself",
}


def named(value, *labels):
    """A value of processes with labels of their information."""
    return f"{value} * on (job, instance, pid, start) group_left ({', '.join(labels)}) {INFO}"


def query(expr, legend="", table=False):
    """One query of a panel."""
    target = {"datasource": SOURCE, "expr": expr, "legendFormat": legend, "editorMode": "code"}
    return target | ({"instant": True, "format": "table"} if table else {"range": True})


class Dashboard:
    """Panels from left to right and from top to bottom, in a grid 24 wide."""

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

    def stat(self, title, description, expr, unit, width=4):
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"}
        return self.add("stat", title, description, [query(expr)], unit, width, 4, options)

    def lines(self, title, description, targets, unit, width=12, stacked=False):
        legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
        options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        custom = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}} if stacked else {"fillOpacity": 0}
        panel = self.add("timeseries", title, description, targets, unit, width, 8, options, **custom)
        # Unknown is a hole, and amounts begin at 0.
        panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] = False
        if unit == "bytes" and not stacked:
            panel["fieldConfig"]["defaults"]["custom"]["axisSoftMin"] = 0
        return panel

    def table(self, title, description, targets, unit, names, width=24):
        """`names`: what the values are called, in the order of the targets."""
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
            "tooltip": "The other dashboards of gpumem",
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
    """A variable of the values of a label."""
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
    """Where from: the data source, the scrape job, the nodes."""
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1},
        variable("job", "Scrape job", "label_values(gpumemd_build_info, job)"),
        variable("instance", "Node", 'label_values(gpumemd_build_info{job="$job"}, instance)', many),
    ]


def link_to_process(panel):
    """A click on a pid opens its dashboard."""
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
        "What each process holds by device. Without an agent only used is known. (other) is the sum of those that are folded.",
        [of("used_bytes"), of("tracked_bytes"), of("untrackable_bytes"), of("used_peak_bytes")],
        "bytes",
        ["used", "tracked", "untrackable", "highest used"],
    )
    link_to_process(panel)


def node():
    board = Dashboard("node", variables())
    board.stat("GPUs", "Devices that NVML shows.", f"count(gpumem_device_info{{{OF}}})", "none")
    board.stat("Used", "Of all devices.", f"sum(gpumem_device_used_bytes{{{OF}}})", "bytes")
    board.stat("Free", "Of all devices.", f"sum(gpumem_device_free_bytes{{{OF}}})", "bytes")
    board.stat("Processes", "On all devices; one that uses two counts twice.", f"sum(gpumem_device_processes{{{OF}}})", "none")
    board.stat(
        "Covered",
        "Share of the bytes of processes whose process has an agent: the rest is a sum without names.",
        f"instance:gpumem_process_covered:ratio{{{OF}}}",
        "percentunit",
    )
    board.stat(
        "Out of memory",
        "Times in the range shown.",
        f"sum(increase(gpumem_device_ooms_total{{{OF}}}[$__range]))",
        "none",
    )
    board.lines(
        "Used by device",
        "Highest of each minute, between scrapes too: a short peak is not missed.",
        [query(f"gpumem_device_used_highest_bytes{{{OF}}}", "GPU {{gpu}}")],
        "bytes",
    )
    board.lines(
        "What the devices hold",
        "All devices: processes, what no process accounts for, the driver's share, free. Together they are the size.",
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
        "What NVML charges to each.",
        [query(named(f"gpumem_process_used_bytes{{{OF}}}", "user", "comm"), "GPU {{gpu}}: {{comm}} {{pid}} {{user}}")],
        "bytes",
        24,
        stacked=True,
    )
    processes(board)
    board.lines(
        "Tracked by category",
        "Of all processes with an agent. Categories are those of the rules ([metrics] rules).",
        [query(f"sum by (category) (gpumem_process_category_bytes{{{OF}}})", "{{category}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Untrackable by cause",
        "What the driver charges beyond all allocations, of all processes with an agent.",
        [query(f"sum by (part) (gpumem_process_untrackable_part_bytes{{{OF}}})", "{{part}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Out of memory by device",
        "How often a process ran out; gpumemctl oom has each.",
        [query(f"increase(gpumem_device_ooms_total{{{OF}}}[$__rate_interval])", "GPU {{gpu}} {{kind}}")],
        "none",
    )
    board.lines(
        "Age of the last reading",
        "Seconds since NVML told what a device holds. Above 2 it does not answer.",
        [query(f"gpumem_device_sample_age_seconds{{{OF}}}", "GPU {{gpu}}")],
        "s",
    )
    return board


def process():
    of = f'{OF}, pid="$pid"'
    pid = variable("pid", "Process", f"label_values({INFO}, pid)")
    board = Dashboard("process", variables() + [pid])
    board.table(
        "Who",
        "What is known of the process. The label claimed names what only the process says.",
        [query(f"gpumem_process_info{{{of}}}", table=True)],
        "none",
        ["alive"],
        16,
    )
    board.table(
        "What to know about its numbers",
        "covered: an agent speaks for it. uncovered: NVML only. late: the agent came after the first allocations. partial: history was lost. blocked, paused, stale: the agent sees nothing, or does not speak.",
        [query(f"sum by (gpu, flag) (gpumem_process_flag{{{of}}})", table=True)],
        "none",
        ["holds"],
        8,
    )
    board.lines(
        "Used",
        "used = predates + tracked + untrackable, at each sample.",
        [
            query(f"sum by (gpu) (gpumem_process_tracked_bytes{{{of}}})", "GPU {{gpu}}: tracked"),
            query(f"sum by (gpu) (gpumem_process_predates_bytes{{{of}}})", "GPU {{gpu}}: predates the agent"),
            query(f"sum by (gpu) (gpumem_process_untrackable_bytes{{{of}}})", "GPU {{gpu}}: untrackable"),
        ],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Used, its peak and its floor",
        "Highest used that was read, and what it did not fall below in a quarter of an hour: a floor that rises is a leak.",
        [
            query(f"gpumem_process_used_bytes{{{of}}}", "GPU {{gpu}}: used"),
            query(f"gpumem_process_used_peak_bytes{{{of}}}", "GPU {{gpu}}: highest"),
            query(f"pid:gpumem_process_used_bytes:min15m{{{of}}}", "GPU {{gpu}}: floor"),
        ],
        "bytes",
    )
    board.lines(
        "Tracked by category",
        "Driver allocations and what pools carve from them, by the rules.",
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
        "context is measured, modules an upper bound, local memory, heaps and rounding are models, unexplained is what they leave.",
        [query(f"sum by (gpu, part) (gpumem_process_untrackable_part_bytes{{{of}}})", "GPU {{gpu}}: {{part}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Events of its agent",
        "Allocations, frees and names a second; and those that were lost.",
        [
            query(f"rate(gpumem_process_events_total{{{of}}}[$__rate_interval])", "applied"),
            query(f"rate(gpumem_process_events_lost_total{{{of}}}[$__rate_interval])", "lost"),
            query(f"rate(gpumem_process_allocation_failures_total{{{of}}}[$__rate_interval])", "allocations that failed"),
        ],
        "ops",
    )
    return board


def fleet():
    job_name = variable("job_name", "Job", f'label_values(gpumem_process_info{{{OF}, job_name!=""}}, job_name)', True)
    board = Dashboard("fleet", variables(True) + [job_name])
    board.stat("Nodes", "That answer.", f"sum(up{{{OF}}})", "none")
    board.stat("GPUs", "Of these nodes.", f"count(gpumem_device_info{{{OF}}})", "none")
    board.stat("Used", "Of all devices.", f"sum(instance:gpumem_device_used_bytes:sum{{{OF}}})", "bytes")
    board.stat("Size", "Of all devices.", f"sum(instance:gpumem_device_total_bytes:sum{{{OF}}})", "bytes")
    board.stat(
        "Covered",
        "Share of the bytes of processes whose process has an agent.",
        f'sum(gpumem_process_used_bytes{{{OF}}} and on (job, instance, gpu, uuid, pid, start) gpumem_process_flag{{{OF}, flag="covered"}}) / sum(gpumem_process_used_bytes{{{OF}}})',
        "percentunit",
    )
    board.stat(
        "Out of memory",
        "Times in the range shown.",
        f"sum(increase(gpumem_device_ooms_total{{{OF}}}[$__range]))",
        "none",
    )
    board.lines(
        "Used by node",
        "Share of the memory of its devices.",
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
        "Of all nodes of this scrape job.",
        [query('user:gpumem_process_used_bytes:sum{job="$job"}', "{{user}}")],
        "bytes",
        stacked=True,
    )
    board.lines(
        "Used by job",
        "Of all nodes of this scrape job. Jobs are named by gpumemctl run --name, Slurm or Kubernetes.",
        [query('job_name:gpumem_process_used_bytes:sum{job="$job", job_name=~"$job_name"}', "{{job_name}}")],
        "bytes",
        stacked=True,
    )
    ranks = f'gpumem_process_used_bytes{{{OF}}} * on (job, instance, pid, start) group_left (job_name, rank) gpumem_process_info{{{OF}, job_name=~"$job_name"}}'
    board.lines(
        "Worst rank of each job, over their mean",
        "1 is even. gpumemctl job ID --prometheus URL says which rank, and why.",
        [query(f"max by (job_name) ({ranks}) / avg by (job_name) ({ranks})", "{{job_name}}")],
        "none",
    )
    board.table(
        "Fullest devices",
        "Share that is not free; the ten fullest now.",
        [query(f"topk(10, uuid:gpumem_device_full:ratio{{{OF}}})", table=True)],
        "percentunit",
        ["full"],
        12,
    )
    board.lines(
        "Memory without names, by node",
        "Of processes that have no agent.",
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
        "How often a process ran out.",
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
        "What runs where.",
        [query(f"gpumemd_build_info{{{OF}}}", table=True)],
        "none",
        ["runs"],
        8,
    )
    board.lines("Sources", "1 while a source works.", [query(f"gpumemd_source_up{{{OF}}}", "{{instance}} {{source}}")], "none", 8)
    board.lines(
        "Age of the state",
        "That a scrape shows: at most a second.",
        [query(f"gpumemd_snapshot_age_seconds{{{OF}}}", "{{instance}}")],
        "s",
        8,
    )
    rates("CPU", "Share of a core.", "percentunit", ("process_cpu_seconds_total", ""))
    board.lines("Resident memory", "Of the daemon.", [query(f"process_resident_memory_bytes{{{OF}}}", "{{instance}}")], "bytes", 8)
    board.lines("File descriptors", "Open in the daemon.", [query(f"process_open_fds{{{OF}}}", "{{instance}}")], "none", 8)
    board.lines(
        "Agents",
        "Connected, and peers that have not said hello.",
        [query(f"gpumemd_agents{{{OF}}}", "{{instance}}"), query(f"gpumemd_agents_waiting{{{OF}}}", "{{instance}} waiting")],
        "none",
        8,
    )
    rates("Records", "Handed to the ledger, a second.", "ops", ("gpumemd_records_total", ""))
    rates("Bytes of agents", "That agents sent, a second.", "Bps", ("gpumemd_agent_bytes_total", ""))
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
    rates("Refused", "Peers and connections that were not let in.", "ops", ("gpumemd_agent_refused_total", "agents: {{reason}}"), ("gpumemd_http_refused_total", "http: {{reason}}"))
    board.lines(
        "Time in process lists",
        "Share of time in which the driver stands still for us; the budget is nvml.list_budget (2 %).",
        [query(f"gpumemd_nvml_list_share_ratio{{{OF}}}", "{{instance}}")],
        "percentunit",
        8,
    )
    rates("NVML calls", "A second.", "ops", ("gpumemd_nvml_memory_calls_total", "memory"), ("gpumemd_nvml_list_calls_total", "lists"), ("gpumemd_nvml_failed_calls_total", "failed"), ("gpumemd_nvml_lists_deferred_total", "lists deferred"))
    rates("Pollers", "Started anew, and given up for a call that hung.", "ops", ("gpumemd_nvml_restarts_total", "started"), ("gpumemd_nvml_hangs_total", "hung"))
    board.lines("Run store", "Size of its file.", [query(f"gpumemd_store_bytes{{{OF}}}", "{{instance}}")], "bytes", 8)
    board.lines("Waiting for the store", "Runs.", [query(f"gpumemd_store_waiting{{{OF}}}", "{{instance}}")], "none", 8)
    rates("Store", "Writes and errors, a second.", "ops", ("gpumemd_store_writes_total", "writes"), ("gpumemd_store_errors_total", "errors"))
    board.lines(
        "Series of a scrape",
        "As Prometheus counts them.",
        [query(f"scrape_samples_scraped{{{OF}}}", "{{instance}}")],
        "none",
        8,
    )
    board.lines(
        "Processes folded",
        "Shown as one, (other): young, and for want of room.",
        [query(f"gpumemd_processes_folded{{{OF}}}", "{{instance}} {{reason}}")],
        "none",
        12,
    )
    board.lines(
        "Time of a scrape",
        "As Prometheus measures it.",
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
