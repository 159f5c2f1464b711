//! Tests of the wire format's public API: every record survives a round trip.
#![allow(missing_docs)]

mod roundtrip;
