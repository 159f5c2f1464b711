CREATE TABLE run (
    id             INTEGER PRIMARY KEY AUTOINCREMENT,
    uid            TEXT NOT NULL UNIQUE,
    stored_s       INTEGER NOT NULL,
    writer_pid     INTEGER,
    writer_start   INTEGER,
    writer_boot    TEXT,
    label          TEXT NOT NULL DEFAULT '',
    source_kind    TEXT NOT NULL DEFAULT '',
    source_origin  TEXT NOT NULL DEFAULT '',
    source_preset  TEXT,
    clock          TEXT NOT NULL DEFAULT 'lines' CHECK (clock IN ('monotonic', 'lines')),
    wall_offset_ns INTEGER,
    pid            INTEGER NOT NULL DEFAULT 0,
    start_ticks    INTEGER NOT NULL DEFAULT 0,
    owner_uid      INTEGER,
    state          TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'closed', 'interrupted')),
    closed_ns      INTEGER,
    closed_status  INTEGER,
    started_ns     INTEGER,
    last_ns        INTEGER,
    events         INTEGER NOT NULL DEFAULT 0,
    facts          TEXT NOT NULL DEFAULT '{}',
    claims         TEXT NOT NULL DEFAULT '{}',
    coverage       TEXT NOT NULL DEFAULT '{}',
    caveats        TEXT NOT NULL DEFAULT '[]'
) STRICT;

CREATE TABLE cell (
    run     INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    idx     INTEGER NOT NULL,
    class   TEXT NOT NULL CHECK (class IN ('direct', 'block', 'pool_idle', 'opaque')),
    tag     TEXT,
    origin  TEXT,
    role    TEXT,
    phase   TEXT,
    library TEXT,
    PRIMARY KEY (run, idx)
) STRICT, WITHOUT ROWID;

CREATE TABLE device (
    run               INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    idx               INTEGER NOT NULL,
    name              TEXT NOT NULL,
    ordinal           INTEGER NOT NULL,
    model             TEXT NOT NULL,
    total_bytes       INTEGER,
    peak_used_bytes   INTEGER,
    peak_used_ns      INTEGER,
    unaccounted_bytes INTEGER,
    series_width_ns   INTEGER NOT NULL,
    beside            TEXT NOT NULL,
    reading           TEXT,
    tenants           TEXT NOT NULL,
    other_tenants     TEXT NOT NULL,
    PRIMARY KEY (run, idx)
) STRICT, WITHOUT ROWID;

CREATE TABLE moment (
    run                  INTEGER NOT NULL,
    device               INTEGER NOT NULL,
    kind                 TEXT NOT NULL CHECK (kind IN ('last', 'peak')),
    time_ns              INTEGER NOT NULL,
    tracked_bytes        INTEGER,
    predates_bytes       INTEGER,
    untrackable_bytes    INTEGER,
    used_absence         TEXT,
    uncovered_used_bytes INTEGER,
    gap_distance_ns      INTEGER NOT NULL,
    torn_min_bytes       INTEGER,
    torn_max_bytes       INTEGER,
    stale                INTEGER NOT NULL,
    partial              INTEGER NOT NULL,
    PRIMARY KEY (run, device, kind),
    FOREIGN KEY (run, device) REFERENCES device (run, idx) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

CREATE TABLE amount (
    run    INTEGER NOT NULL,
    device INTEGER NOT NULL,
    moment TEXT NOT NULL,
    cell   INTEGER NOT NULL,
    bytes  INTEGER NOT NULL,
    PRIMARY KEY (run, device, moment, cell),
    FOREIGN KEY (run, device, moment) REFERENCES moment (run, device, kind) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

CREATE TABLE bucket (
    run              INTEGER NOT NULL,
    device           INTEGER NOT NULL,
    seq              INTEGER NOT NULL,
    time_ns          INTEGER NOT NULL,
    used_min         INTEGER,
    used_max         INTEGER,
    used_last        INTEGER,
    tracked_min      INTEGER,
    tracked_max      INTEGER,
    tracked_last     INTEGER,
    untrackable_min  INTEGER,
    untrackable_max  INTEGER,
    untrackable_last INTEGER,
    samples          INTEGER NOT NULL,
    doubtful         INTEGER NOT NULL,
    PRIMARY KEY (run, device, seq),
    FOREIGN KEY (run, device) REFERENCES device (run, idx) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
