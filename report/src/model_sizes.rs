//! Sizes of the program's models by element type, as its agent describes them (`Body::Models` of the wire format).

use crate::amounts::sum;
use gpumem_model::run::Run;
use std::collections::BTreeMap;

/// Minimum share of a part's bytes for an element type to count as the type of the part.
const MAIN_SHARE: f64 = 0.5;
/// Maximum size of a model's trained parameters, as a share of its frozen ones, for these to be a base with an adapter.
const ADAPTER_SHARE: f64 = 0.5;

/// One model's parameters of one element type, in bytes; for optimizer state the model has no name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Size<'r> {
    model: &'r str,
    /// Name of the type in PyTorch, such as `float32`.
    kind: &'r str,
    bytes: i64,
    /// Bytes that require gradients.
    trainable: i64,
    /// Bytes that an optimizer updates.
    updated: i64,
    /// Bytes of embedding tables with dense gradients, and with sparse ones; 0 if the agent is older.
    tables: [i64; 2],
}

/// Sizes of all models; empty if the agent described none, as older agents do.
#[derive(Debug, Clone, Default)]
pub(crate) struct ModelSizes<'r>(Vec<Size<'r>>);

impl<'r> ModelSizes<'r> {
    /// Reads the description of a run's models. Lines of another form are ignored.
    pub fn of(run: &'r Run) -> Self {
        let sizes = run.process.claims.get("models").map_or("", String::as_str).lines().filter_map(|line| {
            let mut fields = line.split('\t');
            let (model, kind) = fields.next().zip(fields.next())?;
            let mut number = || fields.next()?.parse::<i64>().ok().filter(|bytes| *bytes >= 0);
            let (bytes, trainable, updated) = (number()?, number()?, number()?);
            let tables = [number().unwrap_or(0), number().unwrap_or(0)];
            Some(Size { model, kind, bytes, trainable, updated, tables })
        });
        ModelSizes(sizes.collect())
    }

    /// Returns the bytes of trained embedding tables with dense gradients, and with sparse ones. Tables whose parameter is also that of
    /// another module do not count.
    pub fn tables(&self) -> [i64; 2] {
        [0, 1].map(|at| sum(self.0.iter().map(|size| size.tables[at])))
    }

    /// Returns the element type of most parameters; `None` if it is unknown.
    pub fn parameter_kind(&self) -> Option<&'r str> {
        self.main_kind(false)
    }

    /// Returns the element type of most of the optimizer state; `None` if it is unknown.
    pub fn state_kind(&self) -> Option<&'r str> {
        self.main_kind(true)
    }

    /// Returns the bytes of parameters and of their trainable part, and of optimizer state, with other element types than most
    /// parameters.
    pub fn of_other_kinds(&self) -> [i64; 3] {
        let kind = self.parameter_kind();
        let others = |is_state: bool, bytes: fn(&Size<'_>) -> i64| {
            let others =
                self.0.iter().filter(|size| size.model.is_empty() == is_state && Some(size.kind) != kind);
            sum(others.map(bytes))
        };
        [
            others(false, |size| size.bytes),
            others(false, |size| size.trainable),
            others(true, |size| size.bytes),
        ]
    }

    fn main_kind(&self, is_state: bool) -> Option<&'r str> {
        let part = || self.0.iter().filter(move |size| size.model.is_empty() == is_state);
        let of_kind = |kind: &str| sum(part().filter(|size| size.kind == kind).map(|size| size.bytes));
        let all = sum(part().map(|size| size.bytes));
        let kind = part().map(|size| size.kind).max_by_key(|kind| of_kind(kind))?;
        (of_kind(kind) as f64 > all as f64 * MAIN_SHARE).then_some(kind)
    }

    /// Returns a mostly frozen model, another model without trained parameters, and the bytes of the latter, if these are as many as
    /// the frozen parameters of the first one, in each element type. Such models are a base with an adapter, and a copy of the base.
    pub fn copy_of_base(&self) -> Option<(&'r str, &'r str, i64)> {
        let mut models: BTreeMap<&str, (BTreeMap<&str, i64>, i64)> = BTreeMap::new();
        for size in self.0.iter().filter(|size| !size.model.is_empty()) {
            let (frozen, trainable) = models.entry(size.model).or_default();
            *trainable = trainable.saturating_add(size.trainable);
            let bytes = size.bytes.saturating_sub(size.trainable);
            if bytes > 0 {
                let of_kind = frozen.entry(size.kind).or_default();
                *of_kind = of_kind.saturating_add(bytes);
            }
        }
        let total = |frozen: &BTreeMap<&str, i64>| sum(frozen.values().copied());
        let has_adapter = |(frozen, trainable): &(BTreeMap<&str, i64>, i64)| {
            *trainable > 0 && (*trainable as f64) < total(frozen) as f64 * ADAPTER_SHARE
        };
        let pairs = models.iter().filter(|(_, sizes)| has_adapter(sizes)).flat_map(|(model, (base, _))| {
            let copies =
                models.iter().filter(move |(_, (frozen, trainable))| *trainable == 0 && frozen == base);
            copies.map(move |(copy, _)| (*model, *copy, total(base)))
        });
        pairs.max_by_key(|(.., bytes)| *bytes)
    }

    /// Returns the first of several models of one class with the same sizes of each element type, none of which an optimizer updates,
    /// their number, and the bytes of one; those with the most bytes. Only models for which `is_here` is true count. The agent names
    /// further models of a class `Net#2`, `Net#3`, ...
    pub fn equal_models(&self, is_here: impl Fn(&str) -> bool) -> Option<(&'r str, i64, i64)> {
        let mut models: BTreeMap<&str, BTreeMap<&str, (i64, i64)>> = BTreeMap::new();
        for size in self.0.iter().filter(|size| !size.model.is_empty() && is_here(size.model)) {
            let (bytes, updated) = models.entry(size.model).or_default().entry(size.kind).or_default();
            (*bytes, *updated) = (bytes.saturating_add(size.bytes), updated.saturating_add(size.updated));
        }
        let of_sizes = |sizes: &BTreeMap<&str, (i64, i64)>| sum(sizes.values().map(|(bytes, _)| *bytes));
        let class = |model: &'r str| model.split('#').next().unwrap_or(model);
        let groups = models.iter().filter(|(_, sizes)| sizes.values().all(|(_, updated)| *updated == 0));
        let groups = groups.map(|(model, sizes)| {
            let alike =
                models.iter().filter(|(other, of_other)| class(other) == class(model) && *of_other == sizes);
            (class(model), alike.count() as i64, of_sizes(sizes))
        });
        groups.filter(|(_, count, _)| *count > 1).max_by_key(|(_, count, bytes)| count.saturating_mul(*bytes))
    }

    /// Returns the bytes of a model's parameters that require gradients and that no optimizer updates.
    pub fn not_updated(&self, model: &str) -> i64 {
        let of_model = self.0.iter().filter(|size| size.model == model);
        sum(of_model.map(|size| size.trainable.saturating_sub(size.updated)))
    }

    /// Returns whether a model has parameters that require gradients, but none that an optimizer updates, while optimizers update
    /// other models. `None` if that is unknown. The agent finds most optimizers in their first step, so a new one may update the model.
    pub fn lacks_optimizer(&self, model: &str) -> Option<bool> {
        let of_model = || self.0.iter().filter(|size| size.model == model);
        let has_optimizer = self.0.iter().any(|size| size.updated > 0);
        (has_optimizer && of_model().next().is_some())
            .then(|| of_model().any(|size| size.trainable > 0) && of_model().all(|size| size.updated == 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn copy_of_a_frozen_base_has_its_size() {
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        let mut copy = |text: &str| {
            run.process.claims.insert("models".into(), text.into());
            let sizes = ModelSizes::of(&run);
            sizes.copy_of_base().map(|(model, copy, bytes)| format!("{model} {copy} {bytes}"))
        };
        let adapter = "Peft\tbfloat16\t4000\t0\t0\nPeft\tfloat32\t40\t40\t40\n\tfloat32\t80\t0\t0\n";
        let with = |other: &str| format!("{adapter}{other}");
        assert_eq!(copy(&with("Llama\tbfloat16\t4000\t0\t0")).as_deref(), Some("Peft Llama 4000"));
        let one_type = "Peft\tbfloat16\t4040\t40\t40\nLlama\tbfloat16\t4000\t0\t0";
        assert_eq!(copy(one_type).as_deref(), Some("Peft Llama 4000"));
        assert_eq!(copy(adapter), None);
        assert_eq!(copy(&with("Llama\tfloat32\t4000\t0\t0")), None, "another element type");
        assert_eq!(copy(&with("Reward\tbfloat16\t3990\t0\t0")), None, "another size");
        assert_eq!(copy(&with("Llama\tbfloat16\t4000\t4000\t0")), None, "it is trained");
        assert_eq!(
            copy("Net\tfloat32\t40\t40\t40\nEma\tfloat32\t40\t0\t0"),
            None,
            "a copy of a trained model"
        );
        assert_eq!(copy("Net\tfloat32\t80\t40\t40\nEma\tfloat32\t40\t0\t0"), None, "half of it is trained");
    }

    #[test]
    fn sizes_name_the_main_type_and_models_without_an_optimizer() {
        let log = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/small-train.log");
        let mut run = gpumem_import::read_file(&log, None).expect("a log").remove(0);
        assert_eq!(ModelSizes::of(&run).lacks_optimizer("Teacher"), None);
        let text = "Teacher\tfloat64\t800\t800\t0\nStudent\tfloat32\t90\t90\t90\n\tuint8\t45\t0\t0\nVgg\tfloat32\t9\t0\t0\nbad";
        run.process.claims.insert("models".into(), text.into());
        let sizes = ModelSizes::of(&run);
        assert_eq!((sizes.parameter_kind(), sizes.state_kind()), (Some("float64"), Some("uint8")));
        let models = ["Teacher", "Student", "Vgg", "Other"].map(|model| sizes.lacks_optimizer(model));
        assert_eq!(models, [Some(true), Some(false), Some(false), None]);
    }
}
