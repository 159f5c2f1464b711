//! The daemon's configuration: text is accepted, or refused with the key's name and the reason.
#![no_main]

use gpumemd::config::{Config, Home, Keys, Settings};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Config::parse(text, Path::new(gpumem_fuzz::NAME)) {
        Ok(config) => {
            let mut keys = Keys::of(&config);
            assert!(keys.take(&Keys::of(&config)).is_empty(), "nothing has changed");
            // A path of rules would be opened.
            if config.metrics.rules == Config::default().metrics.rules {
                let (runtime, state, store, service) = (None, None, None, (None, None));
                let home = Home { uid: 7, runtime, state, home: Some("/nowhere".into()), store, service };
                if let Err(error) = Settings::of(&config, bytes.len().is_multiple_of(2), &home) {
                    assert!(!error.to_string().is_empty());
                }
            }
        }
        Err(error) => {
            let told = error.to_string();
            assert!(told.contains(gpumem_fuzz::NAME), "{told}");
        }
    }
});
