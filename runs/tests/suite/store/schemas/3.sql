-- A store of schema 3 with a run: what this schema adds to that of schema 2.
ALTER TABLE cell ADD COLUMN pool TEXT;
ALTER TABLE cell ADD COLUMN pending INTEGER NOT NULL DEFAULT 0;

PRAGMA user_version = 3;
UPDATE cell SET pool = 'torch', pending = 1 WHERE idx = 0;
UPDATE device SET details = json_set(details, '$.iterations', json('{"rows":[{"first":0,"last":0,"count":1,"start_ns":1,'
    || '"end_ns":2,"tracked":[9,8]}]}'), '$.pools', json('[{"id":3,"name":"torch"}]'));
