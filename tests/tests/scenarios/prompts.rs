//! Texts that the scenarios feed the model.

/// Short prompts of different kinds.
pub const PROMPTS: [&str; 10] = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 5, 8, 13,",
    "The naïve café owner said: “",
    "List of ingredients for pancakes:\n-",
    "In 1969, the first humans",
];

/// Passages that models are fed token by token.
pub const PASSAGES: [&str; 10] = [
    "The history of astronomy begins with the observation of the night sky by ancient peoples, who noticed that some of \
     the lights in the sky moved against the background of fixed stars. These wandering lights were called planets, and \
     their motions were recorded on clay tablets by the Babylonians many centuries before the invention of the telescope.",
    "To bake a simple loaf of bread, mix three cups of flour with a teaspoon of salt and a packet of dry yeast. Add one \
     and a half cups of warm water and stir until the dough comes together. Knead it on a floured surface for ten \
     minutes, then let it rise in a warm place until it has doubled in size.",
    "A computer program is a sequence of instructions that a machine can carry out. Programs are written in programming \
     languages, which are translated into machine code by a compiler or executed step by step by an interpreter. Good \
     programs are easy to read, easy to test and easy to change when requirements change.",
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. From the top he could see the whole \
     bay, the fishing boats coming home and the first stars above the hills. He had done this for forty years, and he \
     knew the name of every boat and of every family that lived along the coast.",
    "Photosynthesis is the process by which green plants use sunlight to make food from carbon dioxide and water. It \
     takes place in the chloroplasts of the leaves, which contain a green pigment called chlorophyll. Oxygen is released \
     as a by-product of this reaction, and almost all life on Earth depends on it.",
    "The river Nile flows north through eleven countries in Africa before it reaches the Mediterranean Sea. Every year \
     the river flooded and left a layer of rich soil on the fields, and the farmers of ancient Egypt planted their crops \
     when the water went down again. Without the river there would have been no pyramids.",
    "In music, a chord is a group of notes that are played at the same time. The most common chords have three notes and \
     are called triads. A major triad sounds bright and happy, while a minor triad sounds darker and sadder. Composers \
     use sequences of chords to create tension and to resolve it again at the end of a phrase.",
    "The small company was founded in a garage by two friends who had met at university. Their first product was a \
     device that measured the temperature of soil, and they sold it to farmers in the region. After five years they had \
     two hundred employees, and after ten years their sensors were used on every continent.",
    "Regular exercise has many benefits for the body and for the mind. It strengthens the heart, lowers the blood \
     pressure and helps to control weight. People who walk for thirty minutes every day sleep better, feel less stress \
     and have more energy. It is never too late to start, and every step counts.",
    "The immune system protects the body against bacteria, viruses and other invaders. White blood cells travel through \
     the blood and the lymph and attack anything that they do not recognise. After an infection, some of these cells \
     remember the invader, so that the body can respond faster if it meets the same germ again.",
];
