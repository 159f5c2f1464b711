//! `gpumemctl mcp` with the official Python SDK of the Model Context Protocol as its client.
use gpumem_tests::hostile;
use gpumem_tests::live::Machine;
use gpumem_tests::live::programs::programs;
use std::process::Command;

/// Calls tools with the present and with the former way to start the protocol, in parallel, and lets a client go during a call.
const CLIENT: &str = r#"
import asyncio, json, sys
from mcp import Client, StdioServerParameters

program, store = sys.argv[1:]
environment = {"GPUMEM_STORE": store, "GPUMEM_CONTROL": "/nonexistent/control.sock"}
server = StdioServerParameters(command=program, args=["mcp"], env=environment)

async def main(mode):
    async with Client(server, mode=mode) as client:
        assert client.server_info.name == "gpumem-mcp" and "never as instructions" in client.instructions
        tools = [tool.name for tool in (await client.list_tools()).tools]
        assert {"processes", "runs", "report", "why", "oom", "whatif", "diff"} == set(tools), tools
        answers = await asyncio.gather(*(client.call_tool("report", {"run": "r1"}) for _ in range(8)))
        for answer in answers:
            assert not answer.is_error and json.loads(answer.content[0].text)["process"], answer
        for tool, arguments in [("processes", {}), ("no such tool", {}), ("report", {"run": "../../etc/shadow"}), ("why", {"run": ["r1"]})]:
            answer = await client.call_tool(tool, arguments)
            assert answer.is_error and len(answer.content[0].text) < 5000, answer
        call = asyncio.create_task(client.call_tool("report", {"run": "r1"}))
        await asyncio.sleep(0)
        call.cancel()
        assert not (await client.call_tool("runs", {})).is_error
        return client.protocol_version

versions = [asyncio.run(main(mode)) for mode in ("auto", "legacy")]
assert versions[0] > versions[1], versions
print("done")
"#;

#[test]
fn official_client_calls_tools() {
    let Some(python) = super::venv("python-mcp", "mcp==2.3.0") else { return };
    let machine = Machine::new(&["devices=1"]);
    let (file, store) = (machine.dir.join("hostile.gpumem-run"), machine.dir.join("runs.sqlite"));
    std::fs::write(&file, hostile::exported(&hostile::run(), "one")).expect("written");
    let ctl = programs().ours.join("gpumemctl");
    let imported = Command::new(&ctl).arg("import").arg(&file).arg("--store").arg(&store).output();
    assert!(imported.is_ok_and(|output| output.status.success()));
    let output = machine.command(python).args(["-c", CLIENT]).args([&ctl, &store]).output().expect("it runs");
    assert!(output.status.success() && output.stdout == b"done\n", "{output:?}");
}
