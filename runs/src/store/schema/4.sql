CREATE TABLE detail (
    run    INTEGER NOT NULL,
    device INTEGER NOT NULL,
    name   TEXT NOT NULL,
    seq    INTEGER NOT NULL,
    body   ANY NOT NULL,
    PRIMARY KEY (run, device, name, seq),
    FOREIGN KEY (run, device) REFERENCES device (run, idx) ON DELETE CASCADE
) STRICT;
INSERT INTO detail SELECT run, idx, 'rest', 0, details FROM device;
ALTER TABLE device DROP COLUMN details;

ALTER TABLE run ADD COLUMN life TEXT NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN part INTEGER NOT NULL DEFAULT 1;
ALTER TABLE run ADD COLUMN rolled_ns INTEGER;
ALTER TABLE run ADD COLUMN written_s INTEGER NOT NULL DEFAULT 0;
UPDATE run SET life = uid, written_s = stored_s;
CREATE UNIQUE INDEX run_life ON run (life, part);
