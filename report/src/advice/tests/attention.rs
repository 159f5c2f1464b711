//! Tests of changes for attention.

use super::*;

#[test]
fn attention_of_a_library_that_keeps_scores_has_its_setting_first() {
    const STACK: &str = "BertIntermediate.forward\t/v/transformers/models/bert/modeling_bert.py\t337\n";
    let first = |module: &str, scores: i64, stack: &str| {
        let tags: Vec<(String, i64)> = (0..3)
            .flat_map(|layer| {
                let own = format!("Bert/layer.{layer}/{module}");
                let inner = ["query", "key", "value"].map(|name| (format!("{own}/{name}"), 1));
                inner.into_iter().chain([(own, scores)])
            })
            .collect();
        let held: Vec<_> = tags.iter().map(|(tag, mib)| (Role::Activation, tag.as_str(), *mib)).collect();
        let mut run = holding(&held);
        run.devices[0].details.ooms[0].stack = Some(stack.into());
        items(&run).into_iter().next()
    };
    let found = first("attention/self", 9, STACK).expect("advice");
    assert_eq!(
        (found.kind, found.untrusted_names),
        (Kind::LibrarySetting, vec!["Bert/layer.*/attention/self".to_owned()])
    );
    let other = |module: &str, scores: i64, stack: &str| {
        first(module, scores, stack).is_some_and(|item| item.kind != Kind::LibrarySetting)
    };
    assert!(other("attention/self", 5, STACK), "one operation keeps the projections and its output");
    assert!(other("mixer", 9, STACK), "states of another kind of layer");
    assert!(other("attention/self", 9, "forward\t/v/reader.py\t337\n"), "another library");
}
