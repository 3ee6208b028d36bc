//! Prometheus metrics: a role defines each of its own once, with [`define_metrics!`](crate::define_metrics), and gets a
//! struct of handles and the table of what it exports.
//! For: the coordinator and the worker; `docs/metrics.md` is compared with their tables.
//! Invariant: a handle without labels is atomics alone. One with labels is looked up under a lock: what is counted for
//! every token or step keeps its handle.

pub use prometheus::{Counter, Error as MetricError, Gauge, Histogram, IntCounter, Registry};
use prometheus::{CounterVec, Encoder, GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, Opts, TextEncoder, core};

/// What kind of metric it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Is what it is.
    Gauge,
    /// Counts in buckets.
    Histogram,
}

/// A metric as it is exported.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Definition {
    /// With its unit at the end.
    pub name: &'static str,
    /// One line.
    pub help: &'static str,
    /// How it behaves.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Upper bounds of a histogram's buckets.
    pub buckets: &'static [f64],
}

impl Definition {
    fn options(&self) -> Opts {
        Opts::new(self.name, self.help)
    }

    fn histogram_options(&self) -> HistogramOpts {
        HistogramOpts::from(self.options()).buckets(self.buckets.to_vec())
    }
}

/// Handles of a metric.
pub trait Metric: core::Collector + Clone + Sized + 'static {
    /// What they are handles of.
    const KIND: Kind;

    /// A metric that no registry knows yet.
    ///
    /// # Errors
    /// [`MetricError`] if its name, a label or a bucket is none.
    fn create(definition: &Definition) -> Result<Self, MetricError>;
}

macro_rules! metric {
    ($handle:ty, $kind:ident, $definition:ident => $create:expr) => {
        impl Metric for $handle {
            const KIND: Kind = Kind::$kind;

            fn create($definition: &Definition) -> Result<Self, MetricError> {
                $create
            }
        }
    };
}

metric!(IntCounter, Counter, definition => Self::with_opts(definition.options()));
metric!(Counters, Counter, definition => Self::new(definition.options(), definition.labels));
metric!(Seconds, Counter, definition => Self::new(definition.options(), definition.labels));
metric!(Gauge, Gauge, definition => Self::with_opts(definition.options()));
metric!(Gauges, Gauge, definition => Self::new(definition.options(), definition.labels));
metric!(Histogram, Histogram, definition => Self::with_opts(definition.histogram_options()));
metric!(Histograms, Histogram, definition => Self::new(definition.histogram_options(), definition.labels));

/// Counters with labels.
pub type Counters = IntCounterVec;
/// Counters of seconds, with labels.
pub type Seconds = CounterVec;
/// Gauges with labels.
pub type Gauges = GaugeVec;
/// Histograms with labels.
pub type Histograms = HistogramVec;

/// The exposition text of the registries that there are.
pub fn render(registries: &[Option<&Registry>]) -> String {
    let mut families: Vec<_> = registries.iter().flatten().flat_map(|registry| registry.gather()).collect();
    families.sort_by(|one, other| one.name().cmp(other.name()));
    let mut text = Vec::new();
    if let Err(error) = TextEncoder::new().encode(&families, &mut text) {
        tracing::error!(%error, "metrics cannot be written");
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Defines the metrics of a role: a struct with a handle for each, and its table `DEFINITIONS`.
///
/// ```
/// use lockstep_telemetry::{define_metrics, metrics::{Counters, Histogram, render}};
///
/// const BUCKETS: &[f64] = &[0.1, 1.0];
///
/// define_metrics! {
///     /// The metrics of a shop.
///     pub struct Shop {
///         sales: Counters = "shop_sales_total" ["kind"], "Things sold";
///         wait: Histogram = "shop_wait_seconds" in BUCKETS, "From the door to the counter";
///     }
/// }
///
/// let shop = Shop::new()?;
/// shop.sales.with_label_values(&["bread"]).inc();
/// shop.wait.observe(0.5);
/// assert!(render(&[Some(shop.registry())]).contains("shop_sales_total{kind=\"bread\"} 1"));
/// # Ok::<(), lockstep_telemetry::metrics::MetricError>(())
/// ```
#[macro_export]
macro_rules! define_metrics {
    ($(#[$attribute:meta])* pub struct $name:ident { $(
        $field:ident: $handle:ident = $metric:literal $([$($label:literal),+])? $(in $buckets:expr)?, $help:literal;
    )+ }) => {
        $(#[$attribute])*
        pub struct $name {
            registry: $crate::metrics::Registry,
            $(#[doc = $help] pub $field: $handle,)+
        }

        impl $name {
            /// What is exported.
            pub const DEFINITIONS: &'static [$crate::metrics::Definition] = &[$($crate::metrics::Definition {
                name: $metric,
                help: $help,
                kind: <$handle as $crate::metrics::Metric>::KIND,
                labels: &[$($($label),+)?],
                buckets: $crate::buckets!($($buckets)?),
            }),+];

            /// All of them at zero.
            ///
            /// # Errors
            /// [`MetricError`]($crate::metrics::MetricError) if a definition is none.
            pub fn new() -> Result<Self, $crate::metrics::MetricError> {
                let registry = $crate::metrics::Registry::new();
                let mut definitions = Self::DEFINITIONS.iter();
                $(let $field: $handle = $crate::metrics::register(&registry, definitions.next())?;)+
                Ok(Self { registry, $($field),+ })
            }

            /// Where they are registered.
            pub fn registry(&self) -> &$crate::metrics::Registry {
                &self.registry
            }
        }
    };
}

/// The buckets of a metric; none unless it is a histogram.
#[doc(hidden)]
#[macro_export]
macro_rules! buckets {
    () => {
        &[]
    };
    ($buckets:expr) => {
        $buckets
    };
}

/// Creates a metric and registers it.
#[doc(hidden)]
pub fn register<M: Metric>(registry: &Registry, definition: Option<&Definition>) -> Result<M, MetricError> {
    let definition = definition.ok_or_else(|| MetricError::Msg("a metric has no definition".to_owned()))?;
    let metric = M::create(definition)?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

#[cfg(test)]
mod tests {
    use super::*;

    define_metrics! {
        /// Of a test.
        pub struct Sample {
            plain: IntCounter = "sample_plain_total", "Without labels";
            level: Gauges = "sample_level" ["model", "state"], "With labels";
            wait: Histogram = "sample_wait_seconds" in &[0.5, 1.0], "In buckets";
        }
    }

    #[test]
    fn what_is_defined_is_exported() {
        let sample = Sample::new().unwrap();
        sample.plain.inc();
        sample.level.with_label_values(&["m", "ready"]).set(2.0);
        sample.wait.observe(0.7);
        let text = render(&[Some(sample.registry())]);
        for line in [
            "# HELP sample_plain_total Without labels",
            "# TYPE sample_level gauge",
            "sample_plain_total 1",
            "sample_level{model=\"m\",state=\"ready\"} 2",
            "sample_wait_seconds_bucket{le=\"0.5\"} 0",
            "sample_wait_seconds_bucket{le=\"1\"} 1",
            "sample_wait_seconds_count 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        let names: Vec<_> = Sample::DEFINITIONS.iter().map(|definition| (definition.name, definition.kind)).collect();
        let expected = [
            ("sample_plain_total", Kind::Counter),
            ("sample_level", Kind::Gauge),
            ("sample_wait_seconds", Kind::Histogram),
        ];
        assert_eq!(names, expected);
        assert_eq!(
            (Sample::DEFINITIONS[1].labels, Sample::DEFINITIONS[2].buckets),
            (&["model", "state"][..], &[0.5, 1.0][..])
        );
    }
}
