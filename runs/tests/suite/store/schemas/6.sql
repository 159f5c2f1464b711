-- A store of schema 6 with a run: what this schema adds to that of schema 5.
CREATE TABLE own (
    run  INTEGER NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    seq  INTEGER NOT NULL,
    body ANY NOT NULL,
    PRIMARY KEY (run, name, seq)
) STRICT;
INSERT INTO own VALUES (5, 'rest', 0, '{"counters_dropped":7}');
INSERT INTO own VALUES (5, 'counters', 0, '[{"name":"batch","value":32,"changes":2,"min":16,"max":32,"area":170141183460469231731687303715884105727,"since_ns":1,"until_ns":9,"points":[[1,16],[5,32]]}]');
INSERT INTO own VALUES (5, 'ranges', 0, '[{"name":"load","is_step":false,"count":1,"total_ns":3,"min_ns":3,"max_ns":3,"open":0}]');
INSERT INTO own VALUES (5, 'spans', 0, '[[0,41,2,5]]');

PRAGMA user_version = 6;
