//! Files of other tools, as users pass them to gpumemctl: without a format's name, and untrusted.
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const MXNET2: &str = "\"Attribute Name\",\"Requested Size\",\"Device\",\"Actual Size\",\"Reuse?\"\n\
\"net0:in_arg:weight\",\"4000\",\"0\",\"4096\",\"0\"\n\"nvml_amend\",\"1048576\",\"0\",\"1048576\",\"0\"\n";
const TRACE: &str = "{\"traceEvents\":[\n{\"name\":\"Memory: gpu/0\",\"cat\":\"Device Storage\",\"ph\":\"C\",\"ts\":100,\
\"args\":{\"Memory: gpu/0\":4096}},\n";
const TABLE: &str =
    "Profile Statistics:\nName  Total Count  Min Use (kB)\nMemory: gpu/0  1  0.0  4.0960  2.0\n";
const ANALYSIS: &str = "{\"in_arg\": [4096.0, [\"(in_arg:a).\\n\"]],";
const MEM: &str = "epoch,iteration,peak_cached,current_cached,total_feature_map_usage\n0,1,10,10,5\n";
const SMI: &str = "pid, used_gpu_memory [MiB]\n5, 10 MiB\n";
const TAGS: &str = "in_arg:weight,0.00390625\n";

const ALL: [(&str, &str); 7] = [
    ("mxnet2-csv", MXNET2),
    ("mxnet1-trace", TRACE),
    ("mxnet1-table", TABLE),
    ("tbd-analysis", ANALYSIS),
    ("tbd-mem-csv", MEM),
    ("nvidia-smi-csv", SMI),
    ("mxnet1-csv", TAGS),
];

/// A temporary folder, deleted on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpumemctl-imports-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    fn file(&self, name: &str, content: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).expect("a file");
        path.to_string_lossy().into_owned()
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpumemctl"));
        command.args(args).env("GPUMEM_CONTROL", "/nonexistent/control.sock").stdin(Stdio::null());
        command.env("GPUMEM_STORE", self.0.join("runs.sqlite")).output().expect("gpumemctl")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

#[test]
fn report_and_import_guess_the_format() {
    let folder = Folder::new("guess");
    for (format, content) in ALL {
        let file = folder.file("plain", content);
        let direct = stdout(&folder.run(&["report", "--verbose", &file]));
        assert!(direct.contains(&format!("from {format} plain")), "{direct}");
        let guessed = stdout(&folder.run(&["import", &file]));
        let id = guessed.split(' ').next().expect("a run").to_owned();
        // The same file with the old syntax and with the option gives the same run.
        for args in [&["import", format, &file][..], &["import", "--format", format, &file]] {
            let again = stdout(&folder.run(args));
            assert!(again.starts_with(&format!("{id} (already stored)")), "{again}");
        }
        let stored = stdout(&folder.run(&["report", "--verbose", &id]));
        let told =
            |text: &str| text.split("next: ").next().map(|text| text.replace(&format!("  run {id}"), ""));
        assert_eq!(told(&stored), told(&direct), "a stored run reads like its file");
    }
}

#[test]
fn several_files_of_several_formats_are_imported_at_once() {
    let folder = Folder::new("several");
    let files: Vec<String> = ALL.iter().map(|(format, content)| folder.file(format, content)).collect();
    let mut args = vec!["import"];
    args.extend(files.iter().map(String::as_str));
    assert_eq!(stdout(&folder.run(&args)).matches("next: gpumemctl report r").count(), ALL.len());
    // A file whose name is that of a format is still a file.
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpumemctl"));
        command.args(args).current_dir(&folder.0).env("GPUMEM_STORE", folder.0.join("other.sqlite"));
        command.output().expect("gpumemctl")
    };
    let said = stdout(&run(&["import", "mxnet2-csv", "tbd-mem-csv"]));
    assert_eq!(said.matches("next: ").count(), 2, "{said}");
}

#[test]
fn ten_gigabytes_of_nothing_behind_each_format() {
    let folder = Folder::new("sparse");
    for (format, content) in ALL {
        let path = folder.0.join("hole");
        let mut file = fs::File::create(&path).expect("a file");
        file.write_all(content.as_bytes()).expect("a head");
        file.set_len(10 << 30).expect("a hole");
        // 300 MB of address space: enough for the program, but not for memory that grows with the file.
        let line = format!(
            "ulimit -v 300000; exec '{}' report --format {format} '{}'",
            env!("CARGO_BIN_EXE_gpumemctl"),
            path.display()
        );
        let output = Command::new("sh").args(["-c", &line]).stdin(Stdio::null()).output().expect("sh");
        let text = stdout(&output);
        let said = ["is longer than 256 MiB", "cannot be read from byte", "there is no event for"];
        assert!(said.iter().any(|said| text.contains(said)), "{format}: {text}");
        assert!(format == "nvidia-smi-csv" || text.contains("\ntotal "), "{format}: {text}");
    }
}

#[test]
fn names_from_strangers_do_no_harm() {
    let folder = Folder::new("escapes");
    let evil = "\x1b[2J<b>=cmd|' /C calc'!A0\u{202e}";
    let files = [
        format!("{MXNET2}\"net0:{evil}\",\"1\",\"0\",\"4096\",\"0\"\n"),
        format!("{TAGS}{evil},1\n"),
        TABLE.replace("gpu/0", &format!("cpu {evil}")) + "Memory: gpu/0  1  0.0  4.0960  2.0\n",
        format!("pid, process_name, used_gpu_memory [MiB]\n5, {evil}, 10 MiB\n"),
    ];
    for (number, content) in files.iter().enumerate() {
        let file = folder.file(&number.to_string(), content);
        for args in [&["report", &file][..], &["report", &file, "--by", "tag", "--all"]] {
            let text = stdout(&folder.run(args));
            assert!(!text.contains('\x1b') && !text.contains('\u{202e}'), "{text:?}");
        }
    }
}
