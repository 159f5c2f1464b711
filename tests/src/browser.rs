//! A real Chromium without a window: opens files and pages of this machine, simulates a user, and returns log lines and
//! requests.
//!
//! It is controlled over a pipe with the DevTools protocol: JSON messages, each terminated by a zero byte. It resolves
//! no names, and every request of a page is recorded.

use gpumem_test_support::skip;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Possible names of the program.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
/// Timeout of a message, which usually takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the path of Chromium; `None` with a message if there is none (Debian's package is `chromium`).
///
/// # Panics
/// If there is none and GPUMEM_TOOLS_REQUIRED is set, because CI must not skip.
pub fn chromium() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let found =
        NAMES.iter().flat_map(|name| dirs.iter().map(move |dir| dir.join(name))).find(|path| path.exists());
    if found.is_none() {
        skip("there is no Chromium", "apt-get install chromium");
    }
    found
}

/// A running browser with one page.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    dir: PathBuf,
    session: Option<String>,
    last_id: u64,
    is_loaded: bool,
    /// URLs requested by the page since it was opened.
    pub requests: Vec<String>,
    /// Log lines and errors of its scripts.
    pub logged: Vec<String>,
}

impl Browser {
    /// Starts a browser; its files are in `dir`, which is deleted with it.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(program: &Path, dir: PathBuf) -> Self {
        std::fs::create_dir_all(&dir).expect("a folder");
        // It reads from descriptor 3 and writes to 4.
        let words = "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1";
        let mut command = Command::new("sh");
        command.args(["-c", words]).arg(program).arg("--remote-debugging-pipe");
        command.args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
        ]);
        command.args([
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-dev-shm-usage",
        ]);
        command
            .arg("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
            .arg(format!("--user-data-dir={}", dir.display()));
        command.arg("about:blank").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it runs");
        let (to, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let (sender, from) = channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop();
                if sender.send(serde_json::from_slice(&message).unwrap_or_default()).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Browser {
            child,
            to,
            from,
            dir,
            session: None,
            last_id: 0,
            is_loaded: false,
            requests: Vec::new(),
            logged: Vec::new(),
        };
        let targets = browser.call("Target.getTargets", json!({}));
        let pages = targets["targetInfos"]
            .as_array()
            .expect("targets")
            .iter()
            .filter(|target| target["type"] == "page");
        let page = pages.into_iter().next().expect("a page")["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": page, "flatten": true}));
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Sends a command of the protocol and returns its result.
    ///
    /// # Panics
    /// If it is refused or not answered.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).expect("it listens");
        loop {
            let said = self.next(method);
            if said["id"] == json!(self.last_id) {
                assert!(said["error"].is_null(), "{method}: {}", said["error"]);
                return said["result"].clone();
            }
        }
    }

    fn next(&mut self, what: &str) -> Value {
        let said = self.from.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{what}: {error}"));
        let params = &said["params"];
        match said["method"].as_str() {
            Some("Network.requestWillBeSent") => {
                self.requests.push(params["request"]["url"].as_str().unwrap_or_default().to_owned());
            }
            Some("Page.loadEventFired") => self.is_loaded = true,
            Some("Runtime.consoleAPICalled") => self.logged.push(params["args"].to_string()),
            Some("Runtime.exceptionThrown") => self.logged.push(params["exceptionDetails"].to_string()),
            Some("Log.entryAdded") => self.logged.push(params["entry"]["text"].to_string()),
            _ => {}
        }
        said
    }

    /// Opens a file, and waits until it is loaded.
    ///
    /// # Panics
    /// If it does not load.
    pub fn open(&mut self, file: &Path) {
        self.visit(&format!("file://{}", file.display()));
    }

    /// Opens an address, and waits until it is loaded.
    ///
    /// # Panics
    /// If it does not load.
    pub fn visit(&mut self, url: &str) {
        self.requests.clear();
        self.logged.clear();
        self.is_loaded = false;
        self.call("Page.navigate", json!({"url": url}));
        while !self.is_loaded {
            self.next("a loaded page");
        }
    }

    /// Returns the value of an expression in the page.
    ///
    /// # Panics
    /// If it throws.
    pub fn eval(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let said = self.call("Runtime.evaluate", asked);
        assert!(said["exceptionDetails"].is_null(), "{expression}: {}", said["exceptionDetails"]);
        said["result"]["value"].clone()
    }

    /// Sets the size of the window, and whether the system's theme is dark.
    pub fn show(&mut self, width: u32, height: u32, dark: bool) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let theme = if dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": theme}]});
        self.call("Emulation.setEmulatedMedia", features);
        self.settle();
    }

    /// Waits until everything is drawn.
    pub fn settle(&mut self) {
        self.eval("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))");
    }

    /// Presses a key such as `Tab`, `ArrowRight` or `p`.
    pub fn key(&mut self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            " " => 32,
            "End" => 35,
            "Home" => 36,
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            key => key.bytes().next().map_or(0, |byte| byte.to_ascii_uppercase()),
        };
        let text = match key {
            "Enter" => "\r",
            key if key.len() == 1 => key,
            _ => "",
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({"type": kind, "key": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Returns a PNG of the window, or of the whole page.
    ///
    /// # Panics
    /// If none is made.
    pub fn screenshot(&mut self, whole: bool) -> Vec<u8> {
        let mut asked = json!({"format": "png"});
        if whole {
            let mut clip = self.call("Page.getLayoutMetrics", json!({}))["cssContentSize"].clone();
            clip["scale"] = json!(1);
            asked["captureBeyondViewport"] = json!(true);
            asked["clip"] = clip;
        }
        let said = self.call("Page.captureScreenshot", asked);
        base64(said["data"].as_str().expect("a picture"))
    }
}

/// Decodes base64, as the protocol encodes it.
fn base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    let digits = text.bytes().filter_map(|byte| DIGITS.iter().position(|digit| *digit == byte));
    for digit in digits {
        bits = bits << 6 | digit as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
