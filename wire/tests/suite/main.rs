//! Tests of the wire format's public API: every record survives a round trip.

mod roundtrip;
