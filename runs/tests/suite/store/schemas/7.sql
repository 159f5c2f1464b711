-- A store of schema 7 with a run: what this schema adds to that of schema 6.
ALTER TABLE cell ADD COLUMN inherited INTEGER NOT NULL DEFAULT 0;

PRAGMA user_version = 7;
