//! The page of a report, in a real browser: numbers, keys, hostile strings, silence.
#![allow(missing_docs)]

use gpumem_runs::report::{Report, html};
use gpumem_runs::rules::Groupings;
use gpumem_runs::run::Run;
use gpumem_tests::browser::{Browser, chromium};
use gpumem_tests::pages::{Training, hostile, training};
use std::path::PathBuf;

fn dir(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("gpumem-html-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

fn report(run: &Run) -> Report<'_> {
    Report::new(run, Groupings::of_run(run), None)
}

/// Pictures for people, where GPUMEM_PICTURES names a folder for them.
#[test]
fn pictures() {
    let Some(to) = std::env::var_os("GPUMEM_PICTURES").map(PathBuf::from) else { return };
    let Some(program) = chromium() else { return };
    let mut browser = Browser::start(&program, dir("pictures"));
    let small = training(Training::SMALL);
    let runs = [
        ("small", vec![small.clone()]),
        ("huge", vec![training(Training::HUGE)]),
        ("eight", vec![training(Training::EIGHT)]),
        ("hostile", vec![hostile()]),
        (
            "job",
            (0..4)
                .map(|rank| {
                    let mut run = small.clone();
                    run.process.pid += rank;
                    run
                })
                .collect(),
        ),
    ];
    for (name, runs) in runs {
        let reports: Vec<Report<'_>> = runs.iter().map(report).collect();
        let page = if let [one] = reports.as_slice() {
            html::html(one)
        } else {
            html::group("4 processes of job 8812", &reports, "gpumemctl report --job 8812")
        };
        let file = to.join(format!("{name}.html"));
        std::fs::write(&file, page).expect("written");
        for (width, height, dark) in
            [(1280, 800, false), (1280, 800, true), (800, 600, true), (400, 700, false)]
        {
            browser.show(width, height, dark);
            browser.open(&file);
            browser.eval("document.getElementById('timeline')?.focus()");
            browser.key("p");
            browser.settle();
            let theme = if dark { "dark" } else { "light" };
            std::fs::write(to.join(format!("{name}-{width}-{theme}-top.png")), browser.screenshot(false))
                .expect("written");
            for part in ["summary", "groupings", "paths", "gap", "oom", "iterations"] {
                if std::env::var_os("GPUMEM_PARTS").is_none() || browser.eval(&format!("document.getElementById('{part}')?.scrollIntoView(), Boolean(document.getElementById('{part}'))")) != true { continue; }
                browser.settle();
                std::fs::write(
                    to.join(format!("{name}-{width}-{theme}-{part}.png")),
                    browser.screenshot(false),
                )
                .expect("written");
            }
            std::fs::write(to.join(format!("{name}-{width}-{theme}.png")), browser.screenshot(true))
                .expect("written");
            assert_eq!(browser.logged, Vec::<String>::new(), "{name}");
        }
    }
}
