-- A store of schema 2 with a run: what this schema adds to that of schema 1.
ALTER TABLE moment ADD COLUMN parts TEXT;
ALTER TABLE device ADD COLUMN details TEXT NOT NULL DEFAULT '{}';

PRAGMA user_version = 2;
UPDATE moment SET parts = '{"context_bytes":10,"unexplained_bytes":2}' WHERE kind = 'last';
UPDATE device SET details = '{"accounted_peak_bytes":77,"growth":{"stride":4,"points":[[1,2]],"cells":[[1,[5,6]]]},'
    || '"steps":[{"from_ns":1,"time_ns":2,"bytes":3,"parts":{},"cause":"context created","also":[],"events":1,"kind":"measured",'
    || '"tag":null,"library":null,"expected_bytes":null,"note":null}]}';
