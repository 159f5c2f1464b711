//! Sizes of the program's models by element type, as its agent describes them (`Body::Models` of the wire format).

use crate::sum;
use gpumem_model::run::Run;

/// Minimum share of a part's bytes for an element type to count as the type of the part.
const MAIN_SHARE: f64 = 0.5;

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
            Some(Size { model, kind, bytes: number()?, trainable: number()?, updated: number()? })
        });
        ModelSizes(sizes.collect())
    }

    /// Returns the element type of most parameters; `None` if it is unknown.
    pub fn parameter_kind(&self) -> Option<&'r str> {
        self.main_kind(false)
    }

    /// Returns the element type of most of the optimizer state; `None` if it is unknown.
    pub fn state_kind(&self) -> Option<&'r str> {
        self.main_kind(true)
    }

    fn main_kind(&self, is_state: bool) -> Option<&'r str> {
        let part = || self.0.iter().filter(move |size| size.model.is_empty() == is_state);
        let of_kind = |kind: &str| sum(part().filter(|size| size.kind == kind).map(|size| size.bytes));
        let all = sum(part().map(|size| size.bytes));
        let kind = part().map(|size| size.kind).max_by_key(|kind| of_kind(kind))?;
        (of_kind(kind) as f64 > all as f64 * MAIN_SHARE).then_some(kind)
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
