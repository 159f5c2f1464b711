//! The live page in a real browser on the simulated machine: compared with gpumemctl's output, while memory changes,
//! while the daemon is gone, and as seen by different users.
use gpumem_report::redacted::RedactedRun;
use gpumem_report::rules::Groupings;
use gpumem_report::{Report, html, json, text};
use gpumem_tests::browser::{Browser, chromium};
use gpumem_tests::live::programs::copy_program;
use gpumem_tests::live::prometheus::free_address;
use gpumem_tests::live::{Daemon, Job, Machine, until};
use gpumem_tests::pages::{Training, training};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TWO: &[&str] = &["devices=2", "memory=16G"];
const TRAINS: &[&str] = &["--steps", "1000000", "--step-ms", "20"];
pub(super) const HOLDS: &[&str] = &["--steps", "5", "--hold", "600"];

/// A machine and a daemon with a page.
pub(super) struct Place {
    machine: Machine,
    daemon: Daemon,
    http: SocketAddr,
    config: String,
}

impl Place {
    pub fn new(keys: &[&str]) -> Self {
        let machine = Machine::new(keys);
        let http = free_address();
        let config =
            format!("[nvml]\nlist_every_s = 0.2\nlist_budget = 1.0\n[metrics]\nlisten = \"{http}\"\n");
        let daemon = Daemon::start(&machine, "daemon", &config);
        Place { machine, daemon, http, config }
    }

    pub fn trainer(&self, arguments: &[&[&str]], says: &str) -> Job {
        let mut job = Job::start(&mut self.machine.trainer(&self.daemon.runtime, &arguments.concat()));
        job.wait_for(says);
        job
    }

    fn bare(&self, arguments: &[&[&str]], says: &str) -> Job {
        let mut job = Job::start(&mut self.machine.bare_trainer(&arguments.concat()));
        job.wait_for(says);
        job
    }

    /// Lets processes without an agent hold memory on the GPUs in turn.
    pub fn hold(&self, processes: u32, devices: u32) -> Vec<Job> {
        let hold = |at: u32| {
            let job = Job::start(self.machine.command(Path::new("/bin/sleep")).arg("600"));
            let bytes = u64::from(at * 37 % 11 + 1) << 26;
            self.machine
                .tool("hold", &[&job.pid().to_string(), &(at % devices).to_string(), &bytes.to_string()]);
            job
        };
        (0..processes).map(hold).collect()
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http)
    }

    fn get(&self, path: &str, headers: &str) -> (u16, String, String) {
        get(self.http, path, headers)
    }

    fn status(&self, path: &str) -> u16 {
        self.get(path, "Host: localhost\r\n").0
    }

    fn json(&self, path: &str) -> Value {
        let (status, head, body) = self.get(path, "Host: localhost\r\n");
        assert_eq!(status, 200, "{head} {body}");
        serde_json::from_str(&body).expect("JSON")
    }

    fn ctl(&self, arguments: &[&str]) -> Value {
        let output = self.daemon.ctl(&self.machine, arguments).output().expect("gpumemctl runs");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Returns the path of a process's page once the daemon reports its memory on this many devices.
    pub fn key(&self, pid: u32, devices: usize) -> String {
        until(30, "the process on the page", || {
            let node = self.json("/api/processes");
            let rows = node["processes"].as_array()?.iter();
            let mine: Vec<&Value> = rows.filter(|row| row["pid"] == json!(pid)).collect();
            (mine.len() == devices && mine.iter().all(|row| !row["used_bytes"].is_null()))
                .then(|| format!("{pid}.{}", mine[0]["start_ticks"]))
        })
    }

    /// Changes its configuration while it runs.
    fn reconfigure(&self, change: impl FnOnce(String) -> String) {
        let file = self.machine.dir.join("daemon.toml");
        let text = change(std::fs::read_to_string(&file).expect("a configuration"));
        std::fs::write(&file, text).expect("written");
        self.daemon.job.signal("HUP");
    }

    pub fn browser(&self) -> Option<Browser> {
        let mut browser = Browser::start(&chromium()?, self.machine.dir.join("browser"));
        browser.show(1280, 800, false);
        Some(browser)
    }
}

/// Status, head and body.
fn get(http: SocketAddr, path: &str, headers: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(http).expect("a daemon");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    write!(stream, "GET {path} HTTP/1.1\r\n{headers}\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, head.to_lowercase(), body.to_owned())
}

/// Waits until an expression in the page is true.
pub(super) fn wait(browser: &mut Browser, what: &str, expression: &str) {
    until(40, &format!("{what}: {expression}"), || (browser.eval(expression) == json!(true)).then_some(()));
}

/// Asserts that nothing was logged, and that only the daemon received requests.
pub(super) fn is_quiet(browser: &mut Browser, place: &Place) {
    browser.settle();
    assert_eq!(browser.logged, Vec::<String>::new());
    let home = place.url("/");
    assert!(browser.requests.iter().all(|request| request.starts_with(&home)), "{:?}", browser.requests);
}

fn picture(browser: &mut Browser, name: &str) {
    if let Some(to) = std::env::var_os("GPUMEM_PICTURES").map(PathBuf::from) {
        let picture = browser.screenshot(true);
        std::fs::write(to.join(format!("live-{name}.png")), picture).expect("written");
    }
}

/// Of each row: device, pid, and the bytes of used, tracked, idle and untrackable.
const ROWS: &str = "[...document.querySelectorAll('section[id^=gpu-]')].flatMap((section, device) => [...section.querySelectorAll('tbody tr[data-pid]')].map((row) => [device, Number(row.dataset.pid), ...[...row.querySelectorAll('td.n')].map((cell) => cell.dataset.bytes === undefined ? null : Number(cell.dataset.bytes))]))";
/// Devices of which a column does not add up, to the byte or as printed.
pub(super) const WRONG: &str = "[...document.querySelectorAll('section[id^=gpu-] table')].filter((table) => {
    const amount = (row) => { const cell = row.querySelector('td.n'); return [Number(cell.dataset.bytes), Number(cell.textContent.replaceAll(/[,.]/g, ''))]; };
    const parts = [...table.querySelectorAll('tbody tr[data-pid], tfoot tr.beside')].map(amount);
    const [bytes, printed] = amount(table.querySelector('tfoot tr.sum'));
    return bytes !== parts.reduce((sum, part) => sum + part[0], 0) || printed !== parts.reduce((sum, part) => sum + part[1], 0); }).map((table) => table.textContent)";
/// Elements that extend beyond the edge of a window.
pub(super) const WIDE: &str = "[...document.querySelectorAll('main *')].filter((it) => it.getBoundingClientRect().right > innerWidth + 1 && !it.closest('.scroll, svg, .hidden')).map((it) => it.outerHTML.slice(0, 200)).slice(0, 3)";

fn of_ps(ps: &Value) -> Value {
    let rows = ps["processes"].as_array().expect("rows").iter();
    let mut rows: Vec<Value> = rows
        .map(|row| {
            json!([
                row["device"],
                row["pid"],
                row["used_bytes"],
                row["tracked_bytes"],
                row["idle_bytes"],
                row["untrackable_bytes"]
            ])
        })
        .collect();
    rows.sort_by_key(|row| (row[0].as_u64(), row[1].as_u64()));
    json!(rows)
}

fn sorted(rows: Value) -> Value {
    let mut rows: Vec<Value> = rows.as_array().expect("rows").clone();
    rows.sort_by_key(|row| (row[0].as_u64(), row[1].as_u64()));
    json!(rows)
}

#[test]
fn devices_that_nvml_does_not_have_are_one_line() {
    let place = Place::new(&["devices=1"]);
    // To this daemon, the second GPU of another machine is an invention of the program.
    let other = Machine::new(&["devices=2"]);
    let arguments = [HOLDS, &["--devices", "1"]].concat();
    let mut job = Job::start(&mut other.trainer(&place.daemon.runtime, &arguments));
    job.wait_for("holding");
    let node = until(30, "the claim", || {
        Some(place.json("/api/devices"))
            .filter(|node| node["claims"]["processes"] == 1 && node["devices"] != json!([]))
    });
    assert_eq!(
        (node["claims"]["devices"].as_u64(), node["devices"].as_array().map(Vec::len)),
        (Some(1), Some(1))
    );
    for (command, words) in [
        (["ps"].as_slice(), " (reports a device that NVML does not have)"),
        (&["top", "--once"], "1 process names a device that NVML does not have (gpumemctl ps lists them)"),
    ] {
        let output = place.daemon.ctl(&place.machine, command).output().expect("gpumemctl runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text.matches(words).count(), 1, "{text}");
    }
    let Some(mut browser) = place.browser() else { return };
    browser.visit(&place.url("/"));
    let line = "document.querySelector('[data-key=claims]')?.textContent";
    let text = "1 process names a device that NVML does not have; gpumemctl ps lists them.";
    wait(&mut browser, "the line", &format!("{line} === '{text}'"));
    assert_eq!(browser.eval("document.querySelectorAll('table.devices tbody tr').length"), json!(1));
    job.enough();
    wait(&mut browser, "no line after the program's end", &format!("{line} === undefined"));
}

#[test]
fn page_equals_ps_and_updates() {
    let place = Place::new(TWO);
    let Some(mut browser) = place.browser() else { return };
    let _one = place.trainer(&[HOLDS, &["--devices", "0,1"]], "holding");
    let two = place.trainer(&[HOLDS, &["--seed", "2", "--devices", "0"]], "holding");
    let _bare = place.bare(&[HOLDS, &["--seed", "3", "--devices", "1"]], "holding");
    let key = place.key(two.pid(), 1);
    browser.visit(&place.url("/"));
    let settled = "document.querySelectorAll('tr[data-pid]').length === 4 && document.querySelectorAll('tfoot tr.sum').length === 2 && !document.querySelector('tr[data-pid] .soft')?.textContent.includes('stale')";
    wait(&mut browser, "four rows", settled);
    until(30, "the same numbers", || {
        let (shown, ps) = (sorted(browser.eval(ROWS)), of_ps(&place.ctl(&["ps", "--json"])));
        (shown == ps).then_some(()).or_else(|| {
            eprintln!("{shown}\n{ps}");
            None
        })
    });
    for unit in ["bytes", ""] {
        browser.eval(&format!("document.querySelector('input[name=unit][value=\"{unit}\"]').click()"));
        wait(&mut browser, "sums", "document.querySelectorAll('tfoot tr.sum').length === 2");
        assert_eq!(browser.eval(WRONG), json!([]));
    }
    // A name that contains markup appears on the page within moments, without a reload.
    let hostile = place.machine.dir.join("<b id=x>\u{202e}&\"'");
    copy_program("/bin/sleep", &hostile);
    let mut sleeper = Job::start(place.machine.command(&hostile).arg("600"));
    browser.eval(&format!("document.getElementById('process-0-{key}').focus()"));
    place.machine.tool("hold", &[&sleeper.pid().to_string(), "1", &(3_u64 << 30).to_string()]);
    wait(
        &mut browser,
        "its row",
        &format!("document.querySelector('tr[data-pid=\"{}\"]') !== null", sleeper.pid()),
    );
    let row = format!("document.querySelector('tr[data-pid=\"{}\"]')", sleeper.pid());
    assert_eq!(browser.eval("document.getElementById('x')"), Value::Null);
    // Its details arrive a moment later.
    wait(&mut browser, "its name", &format!("{row}?.textContent.includes('<b id=x>\u{fffd}&')"));
    assert_eq!(
        browser.eval(&format!("Number({row}.querySelector('td.n').dataset.bytes)")),
        json!(3_u64 << 30)
    );
    assert_eq!(
        browser.eval(&format!("{row}.parentElement.firstElementChild === {row}")),
        json!(true),
        "the largest"
    );
    wait(&mut browser, "sums", "document.querySelectorAll('tfoot tr.sum').length === 2");
    assert_eq!(browser.eval(WRONG), json!([]));
    for (width, dark) in [(1280, false), (1280, true), (360, false), (360, true)] {
        browser.show(width, 800, dark);
        assert_eq!(browser.eval(WIDE), json!([]), "{width}");
        assert_eq!(browser.eval("document.documentElement.scrollWidth"), json!(width));
        let ground = if dark { "rgb(20, 23, 27)" } else { "rgb(255, 255, 255)" };
        assert_eq!(browser.eval("getComputedStyle(document.documentElement).backgroundColor"), json!(ground));
        picture(&mut browser, &format!("node-{width}-{dark}"));
    }
    browser.show(1280, 800, false);
    sleeper.signal("KILL");
    sleeper.end();
    wait(&mut browser, "no row", &format!("{row} === null"));
    // Focus stays on the link, and the link leads to the process.
    assert_eq!(browser.eval("document.activeElement.id"), json!(format!("process-0-{key}")));
    is_quiet(&mut browser, &place);
    browser.key("Enter");
    wait(&mut browser, "the process", "document.getElementById('statement') !== null");
    assert_eq!(browser.eval("location.pathname"), json!(format!("/process/{key}")));
    is_quiet(&mut browser, &place);
}

#[test]
fn process_view_keeps_the_readers_selection() {
    let place = Place::new(&["memory=16G"]);
    let Some(mut browser) = place.browser() else { return };
    let trainer = place.trainer(&[TRAINS], "ready");
    let key = place.key(trainer.pid(), 1);
    browser.visit(&place.url(&format!("/process/{key}")));
    wait(&mut browser, "a course", "document.querySelector('#timeline svg') !== null");
    // Without tags there are no elements derived from tags.
    assert_eq!(
        browser.eval("['paths', 'entries'].map((id) => document.getElementById(id))"),
        json!([null, null])
    );
    // With the keyboard alone, every element is reachable, and no element traps the focus.
    let mut reached = BTreeSet::new();
    for _ in 0..60 {
        browser.key("Tab");
        let at = browser.eval(
            "document.activeElement.id || document.activeElement.name || document.activeElement.textContent",
        );
        reached.insert(at.as_str().unwrap_or_default().to_owned());
    }
    for id in ["to the numbers", "all devices", "updates", "timeline", "to the peak"] {
        assert!(reached.contains(id), "{id} in {reached:?}");
    }
    browser.eval("document.getElementById('timeline').focus()");
    browser.key("Home");
    browser.key("ArrowRight");
    // The shown point may change when the timeline grows and has fewer points.
    let cursor = "(() => { const { clock } = DATA.processes[0]; return String(BigInt(clock.base) * 1000000000n + BigInt(Math.round(clock.base_ns + state.cursor))); })()";
    let first = browser.eval(cursor);
    browser.eval("document.querySelector('details[data-key=course]').open = true");
    browser.eval("window.seen = document.getElementById('statement')");
    for _ in 0..2 {
        browser.eval("window.seen = document.getElementById('statement')");
        wait(&mut browser, "an update", "document.getElementById('statement') !== window.seen");
    }
    assert_eq!(browser.eval("document.activeElement.id"), json!("timeline"));
    assert_eq!(browser.eval("document.querySelector('details[data-key=course]').open"), json!(true));
    assert_eq!(browser.eval(cursor), first, "the cursor is where it was");
    let readout = browser.eval("document.getElementById('readout').textContent");
    assert!(readout.as_str().is_some_and(|text| text.contains("tracked")), "{readout}");
    // A chosen moment and a chosen range stay when new data arrive.
    for (key, words) in [("Enter", "at "), ("r", "the fullest moment from")] {
        browser.eval("document.getElementById('timeline').focus()");
        browser.key(key);
        let shown = "(() => { const caption = document.querySelector('#strip figcaption').textContent; return caption.startsWith(momentName()) && momentName(); })()";
        let chosen = browser.eval(shown);
        assert!(chosen.as_str().is_some_and(|name| name.contains(words)), "{key}: {chosen}");
        browser.eval("window.seen = document.getElementById('statement')");
        wait(&mut browser, "an update", "document.getElementById('statement') !== window.seen");
        assert_eq!(browser.eval(shown), chosen);
    }
    browser.key("Escape");
    // Every column adds up, as printed too, in the same document.
    let wrong = "(() => { const rows = [...document.querySelectorAll('#statement tbody tr')].map((row) => [row.dataset.part, ...[...row.querySelectorAll('td.n')].map((cell) => Number(cell.textContent.replaceAll(/[~,.]/g, '')))]);
        const of = (parts, column) => rows.filter(([part]) => parts.includes(part)).reduce((sum, row) => sum + row[column], 0);
        return [1, 2].filter((column) => of(['used'], column) !== of(['predates', 'tracked', 'untrackable'], column) || of(['tracked'], column) !== of(['category', 'smaller', 'others', 'idle', 'opaque'], column)); })()";
    assert_eq!(browser.eval(wrong), json!([]));
    for (width, dark) in [(1280, false), (1280, true), (360, false)] {
        browser.show(width, 800, dark);
        assert_eq!(
            (browser.eval(WIDE), browser.eval("document.documentElement.scrollWidth")),
            (json!([]), json!(width))
        );
        picture(&mut browser, &format!("process-{width}-{dark}"));
    }
    // A paused or hidden page sends no requests.
    browser.eval("document.querySelector('input[name=updates][value=paused]').click()");
    wait(&mut browser, "a pause", "document.querySelector('.asof').textContent === 'paused'");
    browser.settle();
    let asked = browser.requests.len();
    std::thread::sleep(Duration::from_secs(3));
    browser.settle();
    assert!(browser.requests.len() <= asked + 1, "one may have been on its way");
    browser
        .eval("Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true })");
    browser.eval("document.querySelector('input[name=updates][value=live]').click()");
    browser.settle();
    let asked = browser.requests.len();
    std::thread::sleep(Duration::from_secs(3));
    browser.settle();
    assert_eq!(browser.requests.len(), asked, "hidden pages are idle");
    browser.eval("window.seen = document.getElementById('statement'); delete document.visibilityState; document.dispatchEvent(new Event('visibilitychange'))");
    wait(&mut browser, "an update", "document.getElementById('statement') !== window.seen");
    is_quiet(&mut browser, &place);
}

#[test]
fn page_reports_a_daemon_restart() {
    let mut place = Place::new(&["memory=16G"]);
    let Some(mut browser) = place.browser() else { return };
    let trainer = place.trainer(&[HOLDS], "holding");
    let key = place.key(trainer.pid(), 1);
    for (path, has) in [("/".to_owned(), "tr[data-pid]"), (format!("/process/{key}"), "#statement")] {
        browser.visit(&place.url(&path));
        wait(&mut browser, "numbers", &format!("document.querySelector('{has}') !== null"));
        place.daemon.job.signal("KILL");
        place.daemon.job.end();
        wait(
            &mut browser,
            "that it is gone",
            "document.getElementById('trouble')?.textContent.includes('does not answer') === true && document.body.classList.contains('old')",
        );
        assert_eq!(
            browser.eval(&format!("document.querySelector('{has}') !== null")),
            json!(true),
            "earlier data stays"
        );
        picture(&mut browser, &format!("gone-{}", path.len() > 1));
        let name = format!("daemon-{}", path.len());
        place.daemon = Daemon::start(&place.machine, &name, &place.config);
        wait(
            &mut browser,
            "that it is back",
            "document.getElementById('trouble') === null && !document.body.classList.contains('old')",
        );
        wait(&mut browser, "numbers", &format!("document.querySelector('{has}') !== null"));
    }
    // A process that ends is reported too: the page goes on with the report of its run.
    drop(trainer);
    wait(&mut browser, "its end", "document.querySelector('.asof').textContent.startsWith('ended')");
    assert_eq!(browser.eval("document.getElementById('trouble')"), json!(null));
    assert_eq!(browser.eval("document.querySelector('#statement') !== null"), json!(true));
}

/// Tags that a process has given its memory.
fn tags_of(report: &Value) -> BTreeSet<String> {
    let cells = report["devices"][0]["last"]["cells"].as_array().expect("cells").iter();
    cells.filter_map(|cell| cell["tag"].as_str()).filter(|tag| tag.contains('/')).map(str::to_owned).collect()
}

#[test]
fn strangers_are_told_no_more_than_the_configuration_says() {
    let place = Place::new(&["memory=16G"]);
    let trainer = place.trainer(&[HOLDS, &["--seed", "777123"]], "holding");
    let key = place.key(trainer.pid(), 1);
    let own = place.ctl(&["report", &trainer.pid().to_string(), "--json"]);
    let tags = tags_of(&own);
    assert!(tags.len() > 3 && own.to_string().contains("777123"), "{tags:?}");
    let paths = [
        "/api/devices".to_owned(),
        "/api/processes".to_owned(),
        format!("/api/process/{key}"),
        format!("/api/process/{key}/page"),
    ];
    for path in &paths {
        let (status, head, body) = place.get(path, "Host: localhost\r\n");
        assert_eq!(status, 200, "{body}");
        assert!(!body.contains("777123"), "a command line in {path}");
        assert_eq!(tags.iter().find(|tag| body.contains(tag.as_str())), None, "a tag in {path}");
        for header in [
            "x-content-type-options: nosniff",
            "cross-origin-resource-policy: same-origin",
            "connection: close",
        ] {
            assert!(head.contains(header), "{header} in {head}");
        }
        assert!(!head.contains("access-control"), "{head}");
        // The holder is not repeated.
        let tag =
            head.lines().find_map(|line| line.strip_prefix("etag: ")).expect("an etag").trim().to_owned();
        let known = format!("Host: localhost\r\nIf-None-Match: {tag}\r\n");
        until(30, "nothing new", || {
            let (status, head, body) = place.get(path, &known);
            (status == 304 && body.is_empty() || !head.contains(&tag)).then_some(())
        });
        // A foreign page whose host name was rebound to this address.
        assert_eq!(place.get(path, "Host: rebound.example\r\n").0, 421);
    }
    // The process allocates no more, so both show its last sample in the end.
    until(30, "the numbers of gpumemctl", || {
        let own = place.ctl(&["report", &trainer.pid().to_string(), "--json"]);
        let report = place.json(&paths[2]);
        let last = |report: &Value, name: &str| report["devices"][0]["last"][name].clone();
        let names = ["used_bytes", "tracked_bytes", "untrackable_bytes", "structures"];
        let is_same =
            names.iter().all(|name| !last(&own, name).is_null() && last(&report, name) == last(&own, name));
        (report["schema"] == "gpumem.report" && is_same).then_some(())
    });
    for path in [
        "/process/",
        "/process/x.y",
        "/api/",
        "/api/process/1.1",
        "/api/process/99999999999.1",
        "/favicon.ico",
    ] {
        assert_eq!(place.status(path), 404, "{path}");
    }
    assert_eq!(place.status("/"), 200);

    place.reconfigure(|text| text.replace("[metrics]\n", "[metrics]\npage = \"tags\"\n"));
    until(20, "tags", || {
        let body = place.get(&paths[3], "Host: localhost\r\n").2;
        assert!(!body.contains("777123"), "command lines are never sent");
        tags.iter().any(|tag| body.contains(tag.as_str())).then_some(())
    });
    place.reconfigure(|text| format!("tenants = \"anonymous\"\n{text}"));
    until(20, "an unknown name", || (place.status(&paths[3]) == 403).then_some(()));
    let rows = place.json("/api/processes")["processes"].clone();
    let row = &rows[0];
    assert_eq!(
        (&row["pid"], &row["uid"], &row["who"], &row["tracked_bytes"]),
        (&json!(0), &Value::Null, &json!({}), &Value::Null)
    );
    assert!(row["used_bytes"].as_u64() > Some(0));
    place.reconfigure(|text| text.replace("page = \"tags\"", "page = \"off\""));
    until(20, "no page", || (place.status("/") == 404).then_some(()));
    assert!(paths.iter().all(|path| place.status(path) == 404));
    assert_eq!(place.status("/metrics"), 200);
}

#[test]
fn many_pages_cost_as_much_as_one() {
    let place = Place::new(&["memory=16G"]);
    let trainer = place.trainer(&[TRAINS], "ready");
    let key = place.key(trainer.pid(), 1);
    for path in ["/api/processes".to_owned(), format!("/api/process/{key}/page")] {
        let (http, began) = (place.http, std::time::Instant::now());
        let tags: BTreeSet<String> = std::thread::scope(|scope| {
            let ask = || {
                (0..10)
                    .map(|_| {
                        let (status, head, _) = get(http, &path, "Host: localhost\r\n");
                        assert_eq!(status, 200, "{head}");
                        head.lines().find_map(|line| line.strip_prefix("etag: ")).expect("an etag").to_owned()
                    })
                    .collect::<Vec<_>>()
            };
            let askers: Vec<_> = (0..20).map(|_| scope.spawn(ask)).collect();
            askers.into_iter().flat_map(|asker| asker.join().expect("answers")).collect()
        });
        // Two hundred replies. The number of generated states depends only on the elapsed time.
        let pace = if path.ends_with("page") { 1.0 } else { 0.25 };
        let most = began.elapsed().as_secs_f64() / pace + 2.0;
        assert!(
            (tags.len() as f64) < most.max(100.0),
            "{} of 200 answers were made anew in {:?}",
            tags.len(),
            began.elapsed()
        );
    }
}

/// A run in which every string that a process can influence is this one.
fn of_secrets() -> gpumem_model::run::Run {
    const SECRET: &str = "secret/of the process";
    let secret = || SECRET.to_owned();
    let mut run = training(Training { has_oom: true, ..Training::SMALL });
    for cell in run.cells.iter_mut().filter(|cell| cell.tag.as_deref() != Some("(smaller ones)")) {
        (cell.tag, cell.origin, cell.library) =
            (Some(secret()), Some(secret()), Some(format!("/home/{SECRET}.so")));
        if cell.pool.as_deref() != Some("torch") {
            cell.pool = Some(secret());
        }
    }
    for name in ["command", "cwd", "cgroup", "executable"] {
        run.process.facts.insert(name.into(), secret());
    }
    run.process.claims.insert("hint".into(), secret());
    run.coverage.blocked_by = Some(secret());
    run.coverage.marks =
        vec![gpumem_model::run::Mark { time_ns: 11 << 30, name: Some(secret()), by: "program".into() }];
    run.coverage.layers = vec![gpumem_model::run::LayerReport {
        layer: "scopes".into(),
        state: "degraded".into(),
        reason: secret(),
    }];
    let blind = gpumem_model::run::BlindWindow { from_ns: 11 << 30, to_ns: None, why: secret() };
    run.coverage.blind = vec![blind];
    run.caveats[0].text = secret();
    for device in &mut run.devices {
        for step in &mut device.details.steps {
            (step.tag, step.library) = (Some(secret()), Some(secret()));
        }
        for oom in &mut device.details.ooms {
            (oom.tag, oom.library, oom.stack) = (Some(secret()), Some(secret()), Some(secret()));
            (oom.phase, oom.said) = (Some(secret()), Some(secret()));
        }
        device.details.pools =
            vec![gpumem_model::run::Pool { name: Some(secret()), ..gpumem_model::run::Pool::default() }];
    }
    run
}

#[test]
fn redacted_run_has_the_same_sums_and_no_names() {
    let run = of_secrets();
    let open = Report::new(&run, Groupings::of_run(&run), None);
    assert!(json::json(&open).contains("secret"));
    let veiled = RedactedRun::of(&run, Groupings::of_run(&run));
    let report = veiled.report();
    for form in [
        json::json(&report),
        text::text(&report, text::Layout::default()),
        html::data(&report, false, 1 << 20),
        html::html(&report),
    ] {
        assert!(!form.contains("secret"), "{form}");
        assert!(form.contains("parameters"), "{form}");
    }
    let [open, veiled]: [Value; 2] =
        [&open, &report].map(|report| serde_json::from_str(&json::json(report)).expect("JSON"));
    for moment in ["last", "peak"] {
        let [open, veiled] = [&open, &veiled].map(|of| &of["devices"][0][moment]);
        for name in ["used_bytes", "tracked_bytes", "pool_idle_bytes", "untrackable", "named_bytes", "bridge"]
        {
            assert_eq!(open[name], veiled[name], "{moment} {name}");
        }
        let sum = |cells: &Value| {
            cells.as_array().map(|all| all.iter().filter_map(|cell| cell["bytes"].as_i64()).sum::<i64>())
        };
        assert_eq!(sum(&open["cells"]), sum(&veiled["cells"]));
        assert_eq!(sum(&open["structures"]), sum(&veiled["structures"]));
    }
    let points = |of: &Value| of["devices"][0]["timeline"]["points"].clone();
    assert_eq!(points(&open).as_array().map(Vec::len), points(&veiled).as_array().map(Vec::len));
}
