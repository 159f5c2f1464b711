-- A store of schema 5 with a run: what this schema adds to that of schema 4.
ALTER TABLE run ADD COLUMN weight INTEGER;

PRAGMA user_version = 5;
