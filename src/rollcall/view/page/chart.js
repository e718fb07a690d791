// Plotly draws the charts. This file contains the colours for the light and the dark page, and the settings that all charts share.

const COLOURS = ["#2f7ed8", "#e0803a", "#3a9d5d", "#b657b8", "#c8a217", "#d0485a", "#1aa3a3", "#7a6ff0", "#8c6d5a", "#6b7a8f", "#9bbb3c", "#e377c2"];

export const KINDS = {
  rollout: "#e0803a", reward: "#c8566a", update: "#2f7ed8", sync: "#3a9d5d", save: "#8a5aa8", evaluate: "#c8a217",
  wait: "#9aa5b455", other: "#7d8794",
};

export function isDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

export function colour(place) {
  return COLOURS[place % COLOURS.length];
}

export function faint(hex) {
  return hex + "55";
}

export function theme() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  return { ink: value("--ink"), soft: value("--soft"), line: value("--line"), card: value("--card") };
}

export function layout(extra = {}) {
  const look = theme();
  const axis = { gridcolor: look.line, linecolor: look.line, zerolinecolor: look.line, tickcolor: look.line, automargin: true };
  const { xaxis = {}, yaxis = {}, ...rest } = extra;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: look.ink },
    margin: { l: 48, r: 14, t: 10, b: 34 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: look.card, bordercolor: look.line, font: { color: look.ink } },
    dragmode: "zoom",
    showlegend: false,
    uirevision: "kept",
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

export const SETTINGS = {
  displaylogo: false,
  responsive: true,
  showTips: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  displayModeBar: "hover",
};

export function plotly() {
  if (!window.Plotly) throw new Error("The chart script did not load. Reload the page.");
  return window.Plotly;
}
